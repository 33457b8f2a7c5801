"""Whether a plan that comes back may be carried out.

Plans are late by nature. Requests and prefixes of a plan that have ended are skipped, those that
it does not name keep their placement. What else is wrong refuses it as a whole: `Verdict` has the
reasons, `judge` their order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from services.placement.blocks import Residency, num_request_blocks, side_blocks
from services.placement.types import (
    EngineShape,
    Placement,
    Plan,
    PrefixId,
    PrefixPlacement,
    RequestId,
    Snapshot,
)


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
    prefix_ids: frozenset[PrefixId] = frozenset()

    @classmethod
    def of(cls, snapshot: Snapshot, *, step: int, posted_s: float) -> "Question":
        """Return what a snapshot asks."""
        return cls(
            epoch=snapshot.epoch,
            policy=snapshot.policy,
            step=step,
            posted_s=posted_s,
            request_ids=frozenset(request.request_id for request in snapshot.requests),
            prefix_ids=frozenset(prefix.prefix_id for prefix in snapshot.prefixes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlace:
    """A request of this moment, as far as a plan's size depends on it."""

    request_id: RequestId
    num_tokens: int  # known, of its own; the next step computes one more at most
    residency: Residency  # of the placement in force
    holds_kv: bool  # it has blocks, paused or not
    paused: bool
    prefix_ids: tuple[PrefixId, ...] = ()  # which it begins with


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePrefix:
    """A prefix of this moment."""

    prefix_id: PrefixId
    num_tokens: int  # whole blocks
    residency: Residency  # of the placement in force


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The engine when a plan comes."""

    step: int
    last_applied_epoch: int
    live: Sequence[LivePlace]
    engine: EngineShape
    prefixes: Sequence[LivePrefix] = ()  # that live requests begin with


def judge(plan: Plan, question: Question | None, now: Moment) -> Verdict:
    """Return what becomes of a plan. `question`: what its epoch asked, None if not remembered."""
    if plan.epoch <= now.last_applied_epoch:
        return Verdict.IGNORED_SUPERSEDED
    if question is None or question.epoch != plan.epoch:
        return Verdict.REJECTED_EPOCH
    if plan.policy != question.policy:
        return Verdict.REJECTED_POLICY
    named = {placement.request_id for placement in plan.placements}
    prefixes = {placement.prefix_id for placement in plan.prefixes}
    if not (
        named <= question.request_ids | {request.request_id for request in now.live}
        and prefixes <= question.prefix_ids | {prefix.prefix_id for prefix in now.prefixes}
    ):
        return Verdict.REJECTED_UNKNOWN_ID
    every: list[Placement | PrefixPlacement] = [*plan.placements, *plan.prefixes]
    if len(named) + len(prefixes) != len(every) or not _well_formed(every, now.engine):
        return Verdict.REJECTED_SHAPE
    if plan.quality is not None and now.step - question.step > plan.quality.expires_after:
        return Verdict.IGNORED_EXPIRED
    if _num_blocks(plan, now) > now.engine.num_blocks:
        return Verdict.REJECTED_CAPACITY
    return Verdict.APPLIED


def groups_of(layers: Iterable[int], engine: EngineShape) -> tuple[int, ...]:
    """Return the layer groups that layers belong to, ascending."""
    return tuple(sorted({layer // engine.layers_per_group for layer in layers}))


def _well_formed(placements: Iterable[Placement | PrefixPlacement], engine: EngineShape) -> bool:
    return all(_is_placement(placement, engine) for placement in placements)


def _is_placement(placement: Placement | PrefixPlacement, engine: EngineShape) -> bool:
    layers = placement.offloaded_layers
    if any(later <= earlier for earlier, later in pairwise(layers)):
        return False
    if layers and not 0 <= layers[0] <= layers[-1] < engine.num_layers:
        return False
    groups = groups_of(layers, engine)
    if sum(len(engine.layers_of(group)) for group in groups) != len(layers):
        return False
    return (1 if groups else 0) <= placement.num_prefetch_buffers <= len(groups)


def _num_blocks(plan: Plan, now: Moment) -> int:
    """Return the blocks of all that would run, and of the prefixes that they begin with, each once.

    What paused requests hold can be taken from them.
    """
    placed: Mapping[RequestId, Placement] = {p.request_id: p for p in plan.placements}
    geometry = now.engine.geometry
    total, used = 0, set[PrefixId]()
    for request in now.live:
        placement = placed.get(request.request_id)
        paused = request.paused if placement is None else placement.paused
        if paused or not request.holds_kv:
            continue
        residency = _residency(placement, request.residency, now.engine)
        num_tokens = request.num_tokens + 1
        ahead = geometry.max_ahead_tokens
        total += num_request_blocks(geometry, residency, num_tokens=num_tokens, num_ahead=ahead)
        num_tokens += ahead
        total += side_blocks(geometry, num_tokens=num_tokens, num_new_tokens=1 + ahead)
        used.update(request.prefix_ids)
    shared = {p.prefix_id: p for p in plan.prefixes}
    for prefix in now.prefixes:
        if prefix.prefix_id in used:
            residency = _residency(shared.get(prefix.prefix_id), prefix.residency, now.engine)
            total += num_request_blocks(geometry, residency, num_tokens=prefix.num_tokens)
    return total


def _residency(
    placement: Placement | PrefixPlacement | None, in_force: Residency, engine: EngineShape
) -> Residency:
    if placement is None:
        return in_force
    return Residency(
        num_offloaded=len(groups_of(placement.offloaded_layers, engine)),
        num_staging=max(1, placement.num_prefetch_buffers),
    )
