"""Tells the requests of an engine where their time goes, after each step."""

from collections.abc import Callable, Mapping

from services.pacing.cause import Cause
from services.pacing.request_buffer import RequestBuffer
from services.pacing.token_time import Step


class StepTimes:
    """Remembers which requests were part of steps, and what a step without prompts takes."""

    def __init__(self) -> None:
        self._present = set[str]()  # part of a step, and not known to be away since
        self._plain_s = 0.0  # of the newest step without prompts, stall apart

    def ended(
        self,
        step: Step,
        buffers: Mapping[str, RequestBuffer],
        why_away: Callable[[str], Cause | None],
    ) -> None:
        """Take in a step. `buffers`: of live requests, with those that end with this step.
        `why_away` says what keeps one from running; None: nothing but the order of steps.
        """
        for request_id in self._present - step.num_scheduled.keys():
            buffer = buffers.get(request_id)
            cause = why_away(request_id) if buffer is not None else None
            if buffer is not None and cause is not None:
                buffer.time.leave(cause, step.begin_s)
            if buffer is None or cause is not None:
                self._present.discard(request_id)
        returned = step.num_scheduled.keys() - self._present
        self._present.update(returned)
        num_prompt_tokens = sum(number for number in step.num_scheduled.values() if number > 1)
        token_s = self._prompts_s(step, num_prompt_tokens) / max(1, num_prompt_tokens)
        waited = token_s > 0.0 or step.stall_s > 0.0
        for request_id in step.num_scheduled if waited else returned:
            buffer = buffers.get(request_id)
            if buffer is not None:
                number = step.num_scheduled[request_id]
                num_own = number if number > 1 else 0
                prompts_s = token_s * (num_prompt_tokens - num_own)
                buffer.time.run(step, prompts_s=prompts_s, prompt_s=token_s * num_own)

    def _prompts_s(self, step: Step, num_prompt_tokens: int) -> float:
        """Return what prompts added to a step: what it took beyond one without any."""
        busy_s = max(0.0, step.end_s - step.begin_s - step.stall_s)
        if num_prompt_tokens:
            return max(0.0, busy_s - self._plain_s)
        if step.num_scheduled:
            self._plain_s = busy_s
        return 0.0
