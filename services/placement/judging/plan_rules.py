"""Whether a plan that comes back may be carried out.

Plans are late by nature. Finished requests in a plan are skipped, requests that it does not name
keep their placement. What else is wrong refuses it as a whole: `Verdict` has the reasons, `judge`
their order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from services.placement.blocks import BlockGeometry, Residency, num_request_blocks
from services.placement.types import EngineShape, Placement, Plan, RequestId, Snapshot


class Verdict(Enum):
    APPLIED = "applied"
    IGNORED_SUPERSEDED = "ignored_superseded"  # older than the last one carried out
    IGNORED_EXPIRED = "ignored_expired"
    REJECTED_EPOCH = "rejected_epoch"  # of a snapshot that was never taken, or long ago
    REJECTED_POLICY = "rejected_policy"  # of another policy than was asked
    REJECTED_UNKNOWN_ID = "rejected_unknown_id"
    REJECTED_SHAPE = "rejected_shape"
    REJECTED_CAPACITY = "rejected_capacity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What was asked."""

    epoch: int
    policy: str
    step: int  # engine steps before the snapshot
    posted_s: float
    request_ids: frozenset[RequestId]

    @classmethod
    def of(cls, snapshot: Snapshot, *, step: int, posted_s: float) -> "Question":
        """Return what a snapshot asks."""
        return cls(
            epoch=snapshot.epoch,
            policy=snapshot.policy,
            step=step,
            posted_s=posted_s,
            request_ids=frozenset(request.request_id for request in snapshot.requests),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlace:
    """A request of this moment, as far as a plan's size depends on it."""

    request_id: RequestId
    num_tokens: int  # known; the next step computes one more at most
    residency: Residency  # of the placement in force
    holds_kv: bool  # it has blocks, paused or not
    paused: bool

    @property
    def runs(self) -> bool:
        return self.holds_kv and not self.paused


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The engine when a plan comes."""

    step: int
    last_applied_epoch: int
    live: Sequence[LivePlace]
    engine: EngineShape


def judge(plan: Plan, question: Question | None, now: Moment) -> Verdict:
    """Return what becomes of a plan. `question`: what its epoch asked, None if not remembered."""
    if plan.epoch <= now.last_applied_epoch:
        return Verdict.IGNORED_SUPERSEDED
    if question is None or question.epoch != plan.epoch:
        return Verdict.REJECTED_EPOCH
    if plan.policy != question.policy:
        return Verdict.REJECTED_POLICY
    named = {placement.request_id for placement in plan.placements}
    if not named <= question.request_ids | {request.request_id for request in now.live}:
        return Verdict.REJECTED_UNKNOWN_ID
    if len(named) != len(plan.placements) or not _well_formed(plan.placements, now.engine):
        return Verdict.REJECTED_SHAPE
    if plan.quality is not None and now.step - question.step > plan.quality.expires_after:
        return Verdict.IGNORED_EXPIRED
    if _num_blocks(plan, now.live, now.engine) > now.engine.num_blocks:
        return Verdict.REJECTED_CAPACITY
    return Verdict.APPLIED


def groups_of(layers: Iterable[int], engine: EngineShape) -> tuple[int, ...]:
    """Return the layer groups that layers belong to, ascending."""
    return tuple(sorted({layer // engine.layers_per_group for layer in layers}))


def _well_formed(placements: Sequence[Placement], engine: EngineShape) -> bool:
    return all(_is_placement(placement, engine) for placement in placements)


def _is_placement(placement: Placement, engine: EngineShape) -> bool:
    layers = placement.offloaded_layers
    if any(later <= earlier for earlier, later in pairwise(layers)):
        return False
    if layers and not 0 <= layers[0] <= layers[-1] < engine.num_layers:
        return False
    groups = groups_of(layers, engine)
    if sum(len(engine.layers_of(group)) for group in groups) != len(layers):
        return False
    return (1 if groups else 0) <= placement.num_prefetch_buffers <= len(groups)


def _num_blocks(plan: Plan, live: Sequence[LivePlace], engine: EngineShape) -> int:
    """Return the blocks of all who would run. What paused requests hold can be taken from them."""
    placed: Mapping[RequestId, Placement] = {p.request_id: p for p in plan.placements}
    geometry = BlockGeometry(num_groups=engine.num_groups, block_size=engine.block_size)
    total = 0
    for request in live:
        placement = placed.get(request.request_id)
        if placement is None:
            residency, runs = request.residency, request.runs
        else:
            residency = Residency(
                num_offloaded=len(groups_of(placement.offloaded_layers, engine)),
                num_staging=max(1, placement.num_prefetch_buffers),
            )
            runs = not placement.paused and request.holds_kv
        if runs:
            total += num_request_blocks(geometry, residency, num_tokens=request.num_tokens + 1)
    return total
