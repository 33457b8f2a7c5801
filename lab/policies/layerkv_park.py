"""`layerkv-park`: LayerKV's layers on the host for prompts only (arXiv 2410.00428).

As printed, layers that have left the pool are copied back in every decode step, and a step takes
seconds on a PCIe link: the paper's TPOT cannot be had so. It can if layers leave to let a *prompt*
in: it gives its first token at once, its KV waits on the host, and decodes when all of it has room,
first come, first served. How many prompts may begin is Algorithm 1's
(`services/placement/admit/layerkv.py`).
"""

from dataclasses import dataclass

from services.placement.run.papers.room import Room
from services.placement.run.types import (
    IDLE,
    WHOLE,
    RunDecision,
    RunPhase,
    RunRequest,
    RunSnapshot,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerkvParkRules:
    """Ours: the paper does not say how a request that waits on the host comes back."""

    growth_tokens: int = 16  # that what decodes must have room for
    unsaved_blocks: int = 3  # of one that is parked, which are computed again
    interval_s: float = 0.25


NUM_BUFFERS = 2  # through which the layers of a prompt pass
DEFAULT_RULES = LayerkvParkRules()


def decide(snapshot: RunSnapshot, rules: LayerkvParkRules = DEFAULT_RULES) -> RunDecision:
    """Return what decodes, what is parked behind its first token, and the next prompt."""
    requests = snapshot.requests
    if not requests:
        return IDLE
    room = Room(snapshot, growth=rules.growth_tokens)
    begun = sorted((r for r in requests if r.has_begun), key=lambda r: -r.arrival_age_s)
    prompts = [r for r in requests if r.runs and not r.has_begun]
    if not prompts:  # one at a time
        prompts = [r for r in requests if r.phase is not RunPhase.RUNNING and not r.has_begun][:1]
    num_taken = sum(_least_blocks(snapshot, request) for request in prompts)
    decoding = room.filled(begun, num_taken=num_taken) or ([] if prompts else begun[:1])
    over = [r for r in begun if r.runs and r not in decoding]
    leave = [r for r in over if snapshot.is_saved(r, unsaved_blocks=rules.unsaved_blocks)]
    run = [*decoding, *(r for r in over if r not in leave), *prompts]
    return RunDecision(
        run=tuple(r.request_id for r in run),
        park=frozenset(r.request_id for r in leave),
        ways=WHOLE,
        offloads=not room.fits(run),
        valid_for_s=rules.interval_s,
    )


def _least_blocks(snapshot: RunSnapshot, prompt: RunRequest) -> int:
    """Return what a prompt needs of the pool when all its layers leave."""
    open_blocks = snapshot.engine.num_groups
    return NUM_BUFFERS * snapshot.num_rows(prompt.num_tokens) + open_blocks
