"""How long the next decode step should take, by the planner's own model, and whether it does."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import make_pattern
from services.placement.types import EngineShape, Link, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRequest:
    """One request of a step and where its KV is; or a trunk, which the step reads for its users."""

    num_tokens: int  # of KV that the step reads for it, trunks included; 0: a trunk itself
    num_own_tokens: int  # of KV that is its own: what each offloaded layer group loads
    offloaded: tuple[int, ...] = ()  # layer groups in host memory, ascending
    num_buffers: int = 0  # staging buffers


def predicted_step_s(
    batch: Sequence[PlacedRequest], engine: EngineShape, profile: Profile, h2d: Link | None
) -> float:
    """Return the predicted length of a decode step of `batch`.

    Without a measured link copies count as nothing.
    """
    num_context_tokens = sum(request.num_tokens for request in batch)
    num_requests = sum(request.num_tokens > 0 for request in batch)
    layer_s = profile.layer_s(num_requests, num_context_tokens)
    compute_s = [len(engine.layers_of(group)) * layer_s for group in range(engine.num_groups)]
    fetches = [
        Fetch(
            pattern=make_pattern(request.offloaded, request.num_buffers),
            layer_s=h2d.copy_s(request.num_own_tokens // engine.block_size * engine.block_bytes),
        )
        for request in batch
        if request.offloaded and h2d is not None
    ]
    if not fetches:
        return profile.outside_layers_s + sum(compute_s)
    return profile.outside_layers_s + step_timing(compute_s, fetches).total_s


NUM_STEPS = 8  # whose median counts: a single slow step is noise
MIN_GAP_STEPS = 16  # between two alarms


class MismatchDetector:
    """Whether steps take as long as predicted, for one composition of the batch.

    Raises one alarm per deviation; the next needs agreement in between, or a new prediction."""

    def __init__(self, frac: float) -> None:
        """`frac`: how far measured and predicted may be apart; 0 for any distance."""
        self._frac = frac
        self._ratios: deque[float] = deque(maxlen=NUM_STEPS)
        self._armed = True
        self._num_quiet = MIN_GAP_STEPS  # steps since the last alarm

    def restart(self) -> None:
        """Forget measured steps: the batch or the prediction has changed."""
        self._ratios.clear()
        self._armed = True

    def add(self, *, measured_s: float, predicted_s: float) -> bool:
        """Take in one decode step; return whether the planner should know."""
        self._num_quiet += 1
        if not self._frac or predicted_s <= 0.0:
            return False
        self._ratios.append(measured_s / predicted_s)
        if len(self._ratios) < NUM_STEPS:
            return False
        deviation = abs(median(self._ratios) - 1.0)
        if deviation < self._frac / 2.0:
            self._armed = True
        if deviation <= self._frac or not self._armed or self._num_quiet < MIN_GAP_STEPS:
            return False
        self._armed, self._num_quiet = False, 0
        return True
