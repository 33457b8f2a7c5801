"""What a placement policy sees, and what it answers.

A snapshot is complete: a policy reads nothing else, neither a clock nor an environment. Ages are
seconds before the snapshot was taken.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType

RequestId = NewType("RequestId", str)


class RequestPhase(Enum):
    WAITING = "waiting"  # not yet scheduled
    PREFILL = "prefill"  # its prompt is being computed
    DECODING = "decoding"  # it generates
    PAUSED = "paused"  # keeps its place, is not scheduled
    PREEMPTED = "preempted"  # lost its turn and its blocks


class PlanStatus(Enum):
    OPTIMAL = "optimal"  # nothing better exists under the policy's own objective
    FEASIBLE = "feasible"  # keeps every constraint; something better may exist
    INFEASIBLE = "infeasible"  # certified: nothing keeps every constraint
    UNDECIDED = "undecided"  # neither a feasible placement nor a proof was found in time


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What does not change while an engine runs."""

    num_layers: int  # layers with a KV cache, >= 1
    layers_per_group: int  # contiguous layers that share one block table, [1, num_layers]
    block_size: int  # tokens, >= 1
    num_blocks: int  # blocks of the pool; one holds block_size tokens of one layer group, >= 1
    block_bytes: int  # of one block, over all ranks, >= 1
    max_num_seqs: int  # requests in one step, >= 1
    max_num_batched_tokens: int  # tokens in one step, >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """One request as the scheduler sees it."""

    request_id: RequestId
    phase: RequestPhase
    num_prompt_tokens: int  # >= 1
    num_output_tokens: int  # generated, >= 0
    num_computed_tokens: int  # whose KV exists, [0, prompt + output]
    num_deposited_tokens: int  # generated and not yet delivered, [0, num_output_tokens]
    arrival_age_s: float  # >= 0
    first_token_age_s: float | None = None  # [0, arrival_age_s]; None before the first token
    slo_ttft_s: float | None = None  # > 0
    slo_tpot_s: float | None = None  # > 0
    slo_tbt_s: float | None = None  # > 0
    consumption_rate_tps: float | None = None  # tokens per second the reader reads, > 0
    offloaded_layers: tuple[int, ...] = ()  # in host memory now, ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of one engine at one step."""

    epoch: int  # grows by one with each snapshot of an engine, >= 1
    policy: str  # preset that decides
    seed: int  # for policies that draw at random
    engine: EngineShape
    requests: tuple[RequestState, ...]  # in scheduling order
    num_free_blocks: int  # that nobody owns, [0, engine.num_blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What happens to one request."""

    request_id: RequestId
    offloaded_layers: tuple[int, ...] = ()  # belong in host memory, ascending; empty: all resident
    paused: bool = False  # keeps its place, is not scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement for one batch."""

    epoch: int  # of the snapshot it answers
    policy: str  # that decided
    status: PlanStatus
    placements: tuple[Placement, ...]  # one per request of the snapshot, in its order
