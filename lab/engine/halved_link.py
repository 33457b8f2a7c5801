"""Three readers share an engine whose link loses half its speed in the middle of their answers.

A batch of three cannot keep their pace any more; two can, and the third has a deposit. Whether
a reader notices depends on the mismatch trigger: the plan in force was made for the old link, and
its window is long, so that nothing else asks first.
"""

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lab.engine.closed_loop import TokenTimes, Trace, asking
from lab.engine.link import h2d_link
from lab.engine.step_runner import Arrival, StepRunner, make_prompt
from services.executor.copies.device.cpu_device import LinkModel
from services.executor.request_tag import to_extra_args
from services.pacing.attainment import violates_delivered_tbt
from services.pacing.deposit import due_times_s
from services.pacing.types import ServiceLevel
from services.placement.types import PolicyParameters

NUM_READERS = 3
NUM_PROMPT_TOKENS = 300
NUM_OUTPUT_TOKENS = 95
HALVED_AT = 30  # the step
NUM_SETTLING_STEPS = 15  # first steps, whose length says nothing of the batch's
SLO_SCALE = 1.3  # of the median step before the change
PARAMETERS = PolicyParameters(
    alpha=1.5, min_window=96, max_window=256, min_pause_s=0.3, max_pause_s=2.0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What the readers got before or after the change."""

    in_time_frac: float  # of tokens, no later than d_{k-1} + S + epsilon, deposit included
    gap_s: float  # median time between two tokens of a request, as generated


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One run."""

    before: Span
    after: Span
    triggers: dict[str, int]  # since the change
    plans: tuple[int, ...]  # engine steps from the change to each plan that was carried out


def measured_slo_s(runner: StepRunner, planner_address: str) -> float:
    """Return S of every reader: a little more than a step of the three takes at full speed."""
    times = TokenTimes()
    with asking(runner, planner_address, mismatch_frac=0.0, parameters=PARAMETERS):
        runner.run(_readers(None, num_output_tokens=HALVED_AT), hook=times, check=False)
    times_s = times.generated_s["reader-0"][NUM_SETTLING_STEPS:]
    return SLO_SCALE * statistics.median(b - a for a, b in pairwise(times_s))


def run_arm(runner: StepRunner, planner_address: str, *, slo_s: float, mismatch_frac: float) -> Arm:
    """Run the three; `mismatch_frac` 0 switches the trigger off."""
    kv = runner.case.kv
    assert kv is not None
    half = LinkModel(bytes_per_s=kv.h2d_bytes_per_s / 2, latency_s=kv.copy_latency_s)
    times = TokenTimes()
    with (
        asking(runner, planner_address, mismatch_frac=mismatch_frac, parameters=PARAMETERS) as loop,
        ExitStack() as restored,
    ):
        trace = Trace(loop)

        def hook(scheduler: Any, step: int) -> None:
            trace(scheduler, step)
            times(scheduler, step)
            if step == HALVED_AT:
                restored.enter_context(h2d_link(half))

        runner.run(_readers(slo_s), hook=hook, check=False)
    before, after = _spans(times, slo_s)
    first, last = trace.triggers[HALVED_AT], trace.triggers[-1]
    return Arm(
        before=before,
        after=after,
        triggers={n: k - first.get(n, 0) for n, k in last.items() if k > first.get(n, 0)},
        plans=tuple(trace.rises(trace.plans, "applied", since=HALVED_AT)),
    )


def _readers(slo_s: float | None, *, num_output_tokens: int = NUM_OUTPUT_TOKENS) -> list[Arrival]:
    level = ServiceLevel(slo_tbt_s=slo_s)
    return [
        Arrival(
            request_id=f"reader-{n}",
            prompt=make_prompt(NUM_PROMPT_TOKENS, seed=90 + n),
            num_output_tokens=num_output_tokens,
            sampling={"extra_args": to_extra_args(level)},
        )
        for n in range(NUM_READERS)
    ]


def _spans(times: TokenTimes, slo_s: float) -> tuple[Span, Span]:
    in_time: tuple[list[bool], list[bool]] = ([], [])
    gaps_s: tuple[list[float], list[float]] = ([], [])
    for times_s in times.generated_s.values():
        due_s = due_times_s(times_s, slo_s)
        for number in range(1, len(times_s)):
            # All three are served in every step before the change: a token each.
            is_after = number >= HALVED_AT
            late = violates_delivered_tbt(times_s[number], due_s[number - 1], slo_s)
            in_time[is_after].append(not late)
            gaps_s[is_after].append(times_s[number] - times_s[number - 1])
    before, after = (
        Span(in_time_frac=statistics.fmean(in_time[k]), gap_s=statistics.median(gaps_s[k]))
        for k in (0, 1)
    )
    return before, after
