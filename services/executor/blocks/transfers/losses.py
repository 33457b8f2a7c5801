"""Which requests lose their KV when copies go wrong on a rank, and which keep it.

Ranks report by request; whatever one rank reports holds for all of them, because all of them act
on the scheduler's next message only.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import chain

import structlog

from services.control.prefixes.trunks import own_columns
from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.failures import note_failed_saves
from services.executor.blocks.holder import Holder
from services.executor.blocks.residency import RequestKV, Trunk, users_of
from services.executor.blocks.transfers.transfers import Transfers
from services.executor.blocks.transfers.write_through import Retraction
from services.executor.step_messages import FailureCause, StepFeedback

log = structlog.get_logger()

STEPS_BEFORE_RETRY = 16  # of a restore that failed; twice as many after each further failure


class Losses:
    """Turns reports of failed copies into requests that must begin anew, and keeps the rest."""

    def __init__(self, owner: BlockOwner, transfers: Transfers) -> None:
        self._owner = owner
        self._transfers = transfers

    def absorb(self, feedback: StepFeedback) -> dict[str, FailureCause]:
        """Take in a step's failures, before its saves are confirmed and its tokens are looked at.

        Returns the requests whose tokens from this step on are worthless. Those among them that
        have KV must be freed before the next step is scheduled; those that have ended are by now.
        """
        lost = self._lost_with(feedback)
        self._transfers.turn_ends.drop(lost)
        return lost

    def _lost_with(self, feedback: StepFeedback) -> dict[str, FailureCause]:
        lost = {
            request_id: cause
            for request_id, cause in feedback.lost_requests.items()
            if (request_id in self._owner.records or self._transfers.turn_ends.has(request_id))
            and not self._has_begun_anew(request_id, feedback.step)
        }
        if self._owner.returns.lose(feedback.lost_requests):  # its copies on the host are wrong
            self._owner.forget_found()
        lost |= self._lost_with_trunks(feedback.lost_requests)
        for restore_id, cause in feedback.failed_restores.items():
            lost |= self._end_restore(restore_id, cause)
        lost |= self._retract_saves(feedback)
        new_blocks, new_slots = self._owner.quarantine.update(
            feedback.hung_blocks, feedback.hung_slots
        )
        if new_blocks or new_slots:
            self._owner.returns.stop()
            self._owner.late_copies.stop()
            for kv in self._owner.kvs:
                is_hit = self._owner.sides.has_any_of(kv.request_id, new_blocks)
                if kv.request_id not in lost and (is_hit or uses(kv, new_blocks, new_slots)):
                    lost[kv.request_id] = FailureCause.HUNG
        if feedback.lost_requests or lost:  # what is in the pool only may be of their steps
            self._owner.late_copies.stop()
            self._owner.host.forget(lambda column: column.is_left and not column.is_complete)
        return lost | self._distrust(lost)

    def _lost_with_trunks(self, reported: Mapping[str, FailureCause]) -> dict[str, FailureCause]:
        """Return what begins with a trunk that is lost, since whenever: nothing loads it now.

        Or with one that has steps in it of a request that is lost: before it is on the host. Its
        authors may have ended since, or begun anew.
        """
        lost: dict[str, FailureCause] = {}
        for trunk in self._owner.trunks.all if reported else ():
            authors = () if trunk.mirrored else {one.author for one in own_columns(trunk)}
            for name in (trunk.name, *authors):
                if name in reported:
                    lost |= dict.fromkeys((u.request_id for u in trunk.users), reported[name])
        return lost

    def _distrust(self, lost: Mapping[str, FailureCause]) -> dict[str, FailureCause]:
        """Return what else loses its KV because it shares host copies that are corrupt.

        No request begins with what is on the host by now: one that has ended may have read it.
        """
        corrupt = [name for name, cause in lost.items() if cause is FailureCause.CORRUPT]
        if not corrupt:
            return {}
        self._owner.forget_found()
        columns = {c for kv in self._owner.kvs if kv.request_id in corrupt for c in kv.columns}
        return {
            kv.request_id: FailureCause.CORRUPT
            for kv in self._owner.kvs
            if kv.request_id not in lost and not columns.isdisjoint(kv.columns)
        }

    def _has_begun_anew(self, request_id: str, step: int) -> bool:
        """Return whether all that a running request has was computed after a step."""
        record = self._owner.records.get(request_id)
        kv = None if record is None else record.kv
        return kv is not None and not kv.record.state.is_queued and kv.first_step > step

    def _end_restore(self, restore_id: int, cause: FailureCause) -> dict[str, FailureCause]:
        self._owner.counters.num_failed_restores += 1
        if self._owner.returns.fail(restore_id):
            return {}
        kv = self._owner.side_copies.whose(restore_id)
        if kv is not None:  # it waits for all of it
            return {kv.request_id: cause}
        for holder in self._owner.holders():
            for index, group in enumerate(holder.groups):
                if group.restore is None or restore_id not in group.restore.under_way:
                    continue
                self._owner.restores.cancel(holder, index)
                group.restore_from_step = self._owner.orders.next_step + (
                    STEPS_BEFORE_RETRY << min(group.num_failed_restores, 8)
                )
                group.num_failed_restores += 1
                # Bytes that came back wrong may be wrong on the host, and there is no other copy.
                is_lost = cause is FailureCause.CORRUPT
                return {user.request_id: cause for user in users_of(holder)} if is_lost else {}
        return {}

    def _retract_saves(self, feedback: StepFeedback) -> dict[str, FailureCause]:
        lost: dict[str, FailureCause] = {}
        num_retracted: Counter[Holder] = Counter()
        self._owner.side_copies.fail(feedback.failed_saves)
        self._owner.late_copies.fail(feedback.failed_saves)
        write_through = self._transfers.write_through
        for (step, name, group), cause in feedback.failed_saves.items():
            for holder in write_through.whose(step, name, group):
                match write_through.retract(step, holder, group):
                    case Retraction.ONLY_COPY:
                        lost[holder.request_id] = cause
                    case Retraction.DONE:
                        num_retracted[holder] += 1
        for holder, num_saves in num_retracted.items():
            of = holder if isinstance(holder, Trunk) else users_of(holder)[0].record
            has_enough = note_failed_saves(of, self._owner.counters, num_saves)
            if has_enough and holder.request_id not in lost:
                log.warning("kv_request_unmirrored", request_id=holder.request_id)
                if holder.offloaded:  # part of it is on the host only
                    lost[holder.request_id] = FailureCause.FAILED
                else:
                    write_through.unmirror(holder)
        return lost


def uses(kv: RequestKV, block_ids: frozenset[int], slots: frozenset[int]) -> bool:
    """Return whether any of a request's KV is, or will be, in one of these."""
    copied = chain.from_iterable(one for copy in kv.side_copies for one in copy.slots)
    has_slot = not slots.isdisjoint(copied)
    return (
        has_slot
        or any(not slots.isdisjoint(group.host_slots) for group in kv.groups)
        or any(
            block.block_id in block_ids
            for holder in (*kv.trunks, kv)
            for block in holder.owned_blocks()
        )
    )
