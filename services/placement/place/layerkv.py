"""`layerkv`, the placement half (LayerKV, section 3.1.1).

A prefill keeps x layers and sends the rest to the host evenly spaced, x being the fewest for which
copying hides behind computing (Eq. 4). Kept layers leave when the link to the host is idle. Under
a forecast shortage of blocks (Eq. 5) the most recently processed requests give up x/2, then all
of their kept layers.
"""

import math
from collections.abc import Sequence

from services.placement.capacity import prefill_reread_blocks
from services.placement.mirror import Mirror, blocks_with_mirror, mirror_of
from services.placement.step_time.batch import (
    answer,
    capacity_blocks,
    holders_of,
    members,
    placed_pattern,
)
from services.placement.step_time.patterns import Pattern, balanced_pattern
from services.placement.types import (
    EngineShape,
    Holder,
    Plan,
    PlanStatus,
    RequestPhase,
    RequestState,
    Snapshot,
)


def layerkv(snapshot: Snapshot) -> Plan:
    """Place prefills by Eq. 4 and decodes by the state of the link and of the pool."""
    batch, mirror = list(members(snapshot)), mirror_of(snapshot)
    holders = holders_of(snapshot, batch)
    patterns = {one.holder_id: _steady_pattern(one, snapshot, mirror) for one in holders}
    _relieve_shortage(holders, patterns, snapshot, mirror)
    paused = []
    while batch and _excess(holders, patterns, snapshot, mirror) > 0:
        paused.append(batch.pop().request_id)
        holders = holders_of(snapshot, batch)
    status = PlanStatus.INFEASIBLE if paused else PlanStatus.FEASIBLE
    chosen = {one.holder_id: patterns[one.holder_id] for one in holders}
    return answer(snapshot, status, chosen, paused)


def min_kept_layers(request: RequestState, snapshot: Snapshot) -> int:
    """Return x: the fewest layer groups kept for which a prefill's copies hide (Eq. 4).

    Counted against the prefill time: the copies to the host, and, on the other direction of the
    link, the re-reads of offloaded layers by the later chunks of a chunked prefill.
    """
    assert snapshot.profile is not None
    assert snapshot.h2d is not None
    assert snapshot.d2h is not None
    engine, prompt = snapshot.engine, request.num_prompt_tokens
    prefill_s = snapshot.profile.prefill_s_per_token * prompt
    out_s = snapshot.d2h.copy_s(prompt // engine.block_size * engine.block_bytes)
    rereads = prefill_reread_blocks(prompt, engine.max_num_batched_tokens, engine.block_size)
    back_s = snapshot.h2d.copy_s(rereads * engine.block_bytes)
    slowest_s = max(out_s, back_s)
    if slowest_s <= 0.0:
        return 0
    leaving = min(engine.num_groups, math.floor(prefill_s / slowest_s + 1e-9))
    return engine.num_groups - leaving


def evenly_offloaded(engine: EngineShape, num_kept: int) -> Pattern:
    """Return the pattern that keeps `num_kept` groups and offloads the rest evenly."""
    return balanced_pattern(engine.num_groups, engine.num_groups - num_kept)


def num_blocks_forecast(snapshot: Snapshot) -> int:
    """Return Avail(t + 1) = Avail(t) + Released(t) - Allocated(t) (Eq. 5), may be negative.

    Released: what requests hold whose output reaches the median of its predicted range with the
    next token. Allocated: one more block per layer for every request that goes on.
    """
    released = allocated = 0
    for request in members(snapshot):
        if _ends_now(request):
            released += sum(request.num_blocks)
        else:
            allocated += snapshot.engine.num_groups
    return snapshot.num_free_blocks + released - allocated


def _ends_now(request: RequestState) -> bool:
    low, high = request.predicted_min_output_tokens, request.predicted_max_output_tokens
    if low is None or high is None:
        return False
    return request.num_output_tokens + 1 >= (low + high) / 2


def _is_prompt(holder: Holder) -> bool:
    return isinstance(holder, RequestState) and holder.phase is RequestPhase.PREFILL


def _steady_pattern(holder: Holder, snapshot: Snapshot, mirror: Mirror) -> Pattern:
    engine = snapshot.engine
    if isinstance(holder, RequestState) and _is_prompt(holder):
        hidden = evenly_offloaded(engine, min_kept_layers(holder, snapshot))
        return hidden if mirror.possible(holder, hidden) else placed_pattern(holder, engine)
    assert snapshot.d2h is not None
    everything = evenly_offloaded(engine, 0)
    if snapshot.d2h.num_queued_bytes == 0 and mirror.allows(holder, everything):
        return everything
    return placed_pattern(holder, engine)


def _relieve_shortage(
    holders: Sequence[Holder],
    patterns: dict[str, Pattern],
    snapshot: Snapshot,
    mirror: Mirror,
) -> None:
    """Take kept layers from the most recently processed requests: half of them, then all."""
    engine = snapshot.engine
    missing = -num_blocks_forecast(snapshot)
    for divisor in (2, None):
        for one in reversed(holders):
            if max(missing, _excess(holders, patterns, snapshot, mirror)) <= 0:
                return
            before = patterns[one.holder_id]
            kept = engine.num_groups - before.num_offloaded
            fewer = evenly_offloaded(engine, kept // divisor if divisor else 0)
            if mirror.possible(one, fewer) if _is_prompt(one) else mirror.allows(one, fewer):
                missing -= blocks_with_mirror(one, before, mirror, engine)
                missing += blocks_with_mirror(one, fewer, mirror, engine)
                patterns[one.holder_id] = fewer


def _excess(
    holders: Sequence[Holder],
    patterns: dict[str, Pattern],
    snapshot: Snapshot,
    mirror: Mirror,
) -> int:
    need = sum(
        blocks_with_mirror(one, patterns[one.holder_id], mirror, snapshot.engine) for one in holders
    )
    return need - capacity_blocks(snapshot)
