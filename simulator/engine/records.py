"""What a run leaves behind: enough to compute every figure."""

from dataclasses import dataclass, field

from services.pacing.types import ServiceLevel
from services.placement.types import RequestId
from simulator.engine.residency import ResidencySample
from simulator.memory.requests import SimulatedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request at its end. Seconds of virtual time."""

    request_id: RequestId
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int  # that were asked for
    level: ServiceLevel
    # Of each token; none for a rejected request, fewer than were asked for if its reader left.
    generated_s: tuple[float, ...] = ()
    # Length of each step that made a token after the first and computed no prompt beside it.
    decode_steps_s: tuple[float, ...] = ()
    pauses_s: tuple[tuple[float, float], ...] = ()  # beginning and end
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of its prompt, that were not computed when it came in first
    rejected: bool = False  # larger than the engine can ever hold
    leaves_after: int | None = None  # tokens of which its reader goes; None: it stays

    @property
    def num_pauses(self) -> int:
        return len(self.pauses_s)

    @property
    def read_s(self) -> tuple[float, ...]:
        """Return when each token was generated that its reader stayed for."""
        return self.generated_s[: self.leaves_after]


def outcome_of(request: SimulatedRequest, *, rejected: bool) -> Outcome:
    """Return what became of a request that has ended."""
    spec = request.spec
    return Outcome(
        request_id=request.request_id,
        arrival_s=spec.arrival_s,
        num_prompt_tokens=spec.num_prompt_tokens,
        num_output_tokens=spec.num_output_tokens,
        level=spec.level,
        generated_s=tuple(request.generated_s),
        decode_steps_s=tuple(request.decode_steps_s),
        pauses_s=tuple(request.pauses_s),
        num_preemptions=request.num_preemptions,
        num_cached_tokens=request.num_cached_tokens,
        rejected=rejected,
        leaves_after=spec.leaves_after,
    )


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over a run. Integrals are over time in which a step was under way."""

    num_steps: int = 0
    busy_s: float = 0.0
    compute_s: float = 0.0
    stall_s: float = 0.0
    prefill_s: float = 0.0  # of steps that compute a prompt
    pool_used_s: float = 0.0  # integral of the used share of the pool
    host_used_s: float = 0.0
    offloaded_s: float = 0.0  # integral of the offloaded share of running requests' groups
    paused_s: float = 0.0  # integral of the number of paused requests
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    duplicate_s: float = 0.0  # integral of the share of the pool that live requests hold twice
    num_loads: int = 0  # groups copied into staging, one per request and step
    num_computed_tokens: int = 0  # by steps, without drafts and uncached prefixes
    num_recomputed_tokens: int = 0  # of uncached prefixes
    num_cached_tokens: int = 0  # of prompts, that were not computed
    num_found_blocks: int = 0  # that came back without a copy: the pool still had them
    num_loaded_blocks: int = 0  # that came back by one
    num_restored_groups: int = 0  # that came back
    # Of preempted requests and cached prefixes, by way.
    resumes: dict[str, int] = field(default_factory=dict)
    plans: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One policy on one workload."""

    outcomes: tuple[Outcome, ...]  # in the order in which they ended
    totals: Totals
    num_events: int
    end_s: float  # of virtual time
    samples: tuple[ResidencySample, ...] = ()
