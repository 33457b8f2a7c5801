"""How many readers a deployment holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.pacing.types import ServiceLevel
from services.placement.run.reader_capacity import (
    READING_RATE_TPS,
    ReaderCapacity,
    ReadersAlike,
    reader_capacity,
)
from services.placement.run.types import StepCosts
from services.placement.types import RequestId
from simulator.deployment import Deployment
from simulator.device.costs import StepLoad, prompt_alone_s
from simulator.engine.records import RunRecord
from simulator.memory.room import pool_tokens, request_blocks
from simulator.models.types import is_dense
from simulator.report.figures import figures, quantile
from simulator.workload import ArrivingRequest

Run = Callable[[list[ArrivingRequest]], RunRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """What every reader does: ask, read the answer at a steady rate, ask again."""

    num_prompt_tokens: int  # >= 1, computed anew for each question
    num_output_tokens: int = 1_024  # >= 2
    consumption_rate_tps: float = READING_RATE_TPS  # > 0
    num_questions: int = 2  # of each reader, >= 1
    attainment: float = 0.95  # share of tokens in time, and of questions answered in time
    ttft_s: float = 30.0  # until the first token, > 0

    def requests(self, num_readers: int) -> list[ArrivingRequest]:
        """Return the questions: readers begin evenly spaced over the reading of one answer."""
        reading_s = self.num_output_tokens / self.consumption_rate_tps
        level = ServiceLevel(
            slo_tbt_s=1.0 / self.consumption_rate_tps,  # what the policies are told to meet
            consumption_rate_tps=self.consumption_rate_tps,
        )
        return [
            ArrivingRequest(
                request_id=RequestId(f"reader{reader}-{question}"),
                arrival_s=(question + reader / num_readers) * reading_s,
                num_prompt_tokens=self.num_prompt_tokens,
                num_output_tokens=self.num_output_tokens,
                level=level,
            )
            for question in range(self.num_questions)
            for reader in range(num_readers)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One number of readers."""

    num_readers: int
    tbt_deposit: float  # share of tokens in time
    ttft_p95_s: float
    ttft_met: float  # share of questions whose first token came in time
    held: bool


def trial(run: Run, readers: Readers, num_readers: int) -> Trial:
    """Return how so many readers fare."""
    record = run(readers.requests(num_readers))
    found = figures(record)
    ttfts_s = sorted(o.generated_s[0] - o.arrival_s for o in record.outcomes if o.generated_s)
    ttft_met = sum(ttft <= readers.ttft_s for ttft in ttfts_s) / len(record.outcomes)
    return Trial(
        num_readers=num_readers,
        tbt_deposit=found["tbt_deposit"],
        ttft_p95_s=quantile(ttfts_s, 0.95),
        ttft_met=ttft_met,
        held=min(found["tbt_deposit"], ttft_met) >= readers.attainment,
    )


def room_for(deployment: Deployment, readers: Readers) -> ReaderCapacity:
    """Return how many readers pool, link and host have room for, by arithmetic."""
    return reader_capacity(
        deployment.shape(),
        _step_costs(deployment, readers.num_prompt_tokens),
        ReadersAlike(
            num_prompt_tokens=readers.num_prompt_tokens,
            num_output_tokens=readers.num_output_tokens,
            rate_tps=readers.consumption_rate_tps,
            tokens_per_step=deployment.machine().tokens_per_step,
        ),
        link_bytes_per_s=deployment.machine().link_bytes_per_s,
    )


def _step_costs(deployment: Deployment, num_prompt_tokens: int) -> StepCosts:
    """Return the costs of a step by a short one, one that reads the pool, and a prompt alone."""
    shape, machine = deployment.shape(), deployment.machine()
    num_pool_tokens, num_layers = pool_tokens(shape), shape.num_layers
    short = StepLoad(num_decodes=1)
    full = StepLoad(num_decodes=1, num_context_tokens=num_pool_tokens)
    base_s, full_s = (machine.resident_step_s(one, num_layers=num_layers) for one in (short, full))
    prompt_s = prompt_alone_s(
        machine.costs,
        num_prompt_tokens,
        num_layers=num_layers,
        max_tokens=shape.max_num_batched_tokens,
    )
    context_s = (full_s - base_s) / num_pool_tokens
    return StepCosts(
        outside_s=machine.costs.outside_s(short),
        base_s=base_s,
        token_s=0.0 if is_dense(deployment.model) else _token_s(deployment, base_s, context_s),
        context_s=context_s,
        chunk_base_s=0.0,
        chunk_token_s=prompt_s / num_prompt_tokens,
    )


def _token_s(deployment: Deployment, base_s: float, context_s: float) -> float:
    """Return what one more request takes: its experts, windows and states, as in a full step."""
    shape, machine = deployment.shape(), deployment.machine()
    num_tokens = deployment.max_model_len
    number = max(1, min(shape.max_num_seqs, shape.num_blocks // request_blocks(shape, num_tokens)))
    num_context = number * num_tokens
    load = StepLoad(num_decodes=number, num_context_tokens=num_context)
    step_s = machine.resident_step_s(load, num_layers=shape.num_layers)
    return max(0.0, step_s - base_s - context_s * num_context) / number


def largest_held(
    run: Run, readers: Readers, *, max_readers: int, tried: Callable[[Trial], None]
) -> int:
    """Return the most readers that are held, in [0, max_readers], by doubling and bisection.

    Assumes that whoever holds n readers holds fewer, too. `tried` is called after each trial.
    """

    def held(num_readers: int) -> bool:
        one = trial(run, readers, num_readers)
        tried(one)
        return one.held

    low, high = 0, 1
    while high <= max_readers and held(high):
        low, high = high, min(2 * high, max_readers) if high < max_readers else high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if held(middle) else (low, middle)
    return low


def in_words(most: int, trials: Sequence[Trial], readers: Readers) -> str:
    """Say how many are held, and what one more would have had."""
    beyond = next((trial for trial in trials if trial.num_readers == most + 1), None)
    if beyond is None:
        return f"{most} readers or more"
    return (
        f"{most} readers; with {most + 1}, {beyond.tbt_deposit:.1%} of tokens are in time and "
        f"{beyond.ttft_met:.1%} of first tokens within {readers.ttft_s:g} s"
    )
