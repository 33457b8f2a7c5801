"""What a session has of one request."""

import math
from dataclasses import dataclass, replace

from services.executor.serving.next_prefixes import AnswerSoFar
from services.executor.serving.request_trace import RequestTrace
from services.executor.serving.step_stream import BEAT_S
from services.executor.types import Delta, Ending, Failure, PreparedRequest, Submission
from services.generation.logprobs import EchoedPrompt
from services.pacing.deposit import max_held_s, release_interval_s
from services.pacing.types import ServiceLevel

COVER_S = 3 * BEAT_S  # of reading at the gateway: until the beat, and as long as reports take


@dataclass(slots=True, kw_only=True)
class StreamedRequest:
    """A request that was submitted and has neither ended nor been refused."""

    submission: Submission
    trace: RequestTrace
    engine_id: str = ""  # empty until the engine knows it
    prompt: EchoedPrompt | None = None  # known once it is prepared, if it is to be given back
    num_generated: int = 0
    num_delivered: int = 0
    reads: bool = True  # the scheduler takes the tokens to come for text that is read
    interval_s: float = 0.0  # between two tokens, as its reader reads them; 0: no pace is known
    is_paced: bool = False  # the gateway keeps tokens back until they are due
    num_awaited: int = 0  # tokens to be computed until it has a new one; 0: it has
    answer: AnswerSoFar | None = None  # where what the next turn begins with is to be computed

    def pace(self, level: ServiceLevel) -> None:
        """Take in how it is read from now on."""
        self.interval_s = release_interval_s(level)
        self.is_paced = self.interval_s > 0 and max_held_s(level) == math.inf

    def take(self, delta: Delta) -> None:
        """Take in a step of its answer."""
        self.num_generated += len(delta.tokens)
        if self.answer is not None:
            self.answer.take(delta.tokens)

    @property
    def num_deposited(self) -> int:
        return max(0, self.num_generated - self.num_delivered)

    @property
    def num_covering(self) -> float:
        """Return how many tokens the gateway must have for its reader to lack none for `COVER_S`,
        but for what the newest report's way here took; infinite where tokens go to the client as
        they come.
        """
        if not (self.is_paced and self.reads):
            return math.inf
        return self.num_delivered + 1 + COVER_S / self.interval_s

    def echo(self, delta: Delta) -> EchoedPrompt | None:
        """Return the prompt if it goes with `delta`, which is not counted yet: with the first
        tokens only, although an engine that computes a prompt again scores it again.
        """
        if self.prompt is None or self.num_generated or not delta.tokens:
            return None
        return replace(self.prompt, logprobs=delta.prompt_logprobs)


def echoed_prompt(submission: Submission, prepared: PreparedRequest) -> EchoedPrompt | None:
    """Return what is to be given back of a prompt that nothing is computed of yet."""
    if not (submission.echo or submission.returns_prompt_ids):
        return None
    text = prepared.text or "" if submission.echo else ""
    return EchoedPrompt(text, token_ids=prepared.prompt_ids)


def result_label(ending: Ending) -> str:
    return "failed" if isinstance(ending, Failure) else ending.value
