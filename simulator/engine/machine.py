"""What a simulated engine runs on: compute, link, and what drafts for it."""

from dataclasses import dataclass, replace

from services.control.measures.step_timing import CopyTime, LinkCalibration
from simulator.device.copies import Lane
from simulator.device.costs import Costs, StepLoad, resident_step_s
from simulator.device.drafts import Drafts
from simulator.device.step import NO_COSTS, CopyCosts
from simulator.memory.moves import WHOLE_KV, WayBack


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What an engine runs on."""

    costs: Costs
    link_bytes_per_s: float  # of all GPUs together, each direction
    copy_overhead_s: float = 0.0  # per copy
    chunk_bytes: int = 4 << 20  # of one copy at most, over all GPUs
    copies: CopyCosts = NO_COSTS
    compute_noise_frac: float = 0.0  # standard deviation, per step
    link_noise_frac: float = 0.0  # standard deviation, per step
    way_back: WayBack = WHOLE_KV
    schedules_ahead: bool = False  # each step while the one before it runs, as vLLM on GPUs
    drafts: Drafts | None = None

    def lane(self) -> Lane:
        return Lane(
            bytes_per_s=self.link_bytes_per_s,
            copy_overhead_s=self.copy_overhead_s,
            chunk_bytes=self.chunk_bytes,
        )

    def calibration(self) -> LinkCalibration:
        """Return what copies of two sizes take while the link is idle."""
        small, large = (
            CopyTime(
                num_bytes=num_bytes,
                busy_s=self.copy_overhead_s + num_bytes / self.link_bytes_per_s,
                num_copies=1,
            )
            for num_bytes in (max(1, self.chunk_bytes // 64), self.chunk_bytes)
        )
        return LinkCalibration(small_h2d=small, large_h2d=large, small_d2h=small, large_d2h=large)

    @property
    def num_drafts(self) -> int:
        """Return how many tokens are drafted for each request that decodes, in each step."""
        return self.drafts.num_drafts if self.drafts else 0

    @property
    def tokens_per_step(self) -> float:
        """Return how many tokens a step brings a request that decodes, mean."""
        return self.drafts.tokens_per_step if self.drafts else 1.0

    def drafting_s(self, layers_s: float) -> float:
        """Return what a step takes to draft for the next one, by what its layers take."""
        return self.drafts.cost_frac * layers_s if self.drafts else 0.0

    def resident_step_s(self, load: StepLoad, *, num_layers: int) -> float:
        """Return the length of a step that waits for no copy and has all of its drafts.

        `load`: without them.
        """
        load = replace(load, num_drafts=self.num_drafts * load.num_decodes)
        step_s = resident_step_s(self.costs, load, num_layers=num_layers)
        return step_s + self.drafting_s(num_layers * self.costs.layer_s(load))
