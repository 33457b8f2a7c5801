"""What the engine measures of itself, for what weighs copies against computing."""

from dataclasses import dataclass

from services.placement.run.resume import PromptCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of this moment; None: not measured yet. Bytes are of all ranks together."""

    h2d_bytes_per_s: float | None = None  # while the link is busy
    d2h_bytes_per_s: float | None = None
    step_s: float | None = None  # of steps without prefill
    prompt: PromptCost | None = None


MAX_MIRRORED_BLOCKS = 1024  # of resident groups, that a step copies to the host


def write_budget_blocks(
    rates: Rates, *, block_bytes: int, max_blocks: int, num_under_way: int
) -> int:
    """Return how many blocks write-through may order in this step.

    As much as the link moves in a step, and less while earlier copies are still under way: a
    queue of a few steps would delay the copies that steps wait for. At least one block, or a slow
    link would mirror nothing; 0 if `max_blocks` is.
    """
    if max_blocks <= 0:
        return 0
    rate, step_s = rates.d2h_bytes_per_s, rates.step_s
    if rate is None or step_s is None:
        return max_blocks
    per_step = min(max_blocks, max(1, int(rate * step_s / block_bytes)))
    return max(0, min(per_step, 3 * per_step - num_under_way))
