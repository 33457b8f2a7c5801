"""Turns the scheduler's decisions into each step's transfers, and feedback into state.

The scheduler side of the connector: after a step is scheduled, `plan_step` says what the ranks
copy in it; when its feedback arrives, `absorb` counts what is complete; before the next step is
scheduled, `settle` acts on it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict

from services.control.prefixes.trunks import num_duplicate_blocks, own_columns
from services.control.requests.life import State
from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.holder import Holder
from services.executor.blocks.residency import RequestKV, SideStage
from services.executor.blocks.transfers.prompt_ends import PromptEnds
from services.executor.blocks.transfers.turn_ends import TurnEnds
from services.executor.blocks.transfers.write_through import WriteThrough
from services.executor.stats.kv_stats import KVStats, Residencies
from services.executor.step_messages import StepFeedback, StepTransfers

STEPS_PER_STATS = 32


class Transfers:
    """Decides what is copied in each step, and knows what has been."""

    def __init__(
        self,
        owner: BlockOwner,
        *,
        num_ranks: int,
        write_budget: Callable[[int], int],
    ) -> None:
        """See `WriteThrough` for `write_budget`."""
        self.owner = owner
        self.write_through = WriteThrough(owner, budget=write_budget)
        owner.trunks.splits.on_split = self.write_through.split
        self.prompt_ends, self.turn_ends = PromptEnds(owner), TurnEnds(owner, self.may_leave)
        self._num_ranks = num_ranks
        self._unsettled: dict[Holder, None] = {}
        self._num_ranks_done: Counter[int] = Counter()
        self._num_stats_asked = 0
        self._reported = owner.counters.copy()

    def relieve(self) -> bool:
        """Give up restores for want of blocks; return whether some came free or will by themselves.

        They will if a copy is under way whose completion gives blocks back.
        """
        num_free = self.owner.blocks.num_free
        self.owner.returns.stop()
        self.owner.late_copies.stop()
        for holder in self.owner.holders():
            for index in range(len(holder.groups)):
                if self.owner.restores.cancel(holder, index):
                    self._unsettled[holder] = None
        return (
            self.owner.blocks.num_free > num_free
            or bool(self.owner.restores.orphans or self._unsettled)
            or self.write_through.frees_blocks()
            or self.owner.side_copies.is_busy
        )

    def settle(self) -> None:
        """Act on completed copies: seal blocks, flip restored rows, end cancelled restores.

        Requests that have ended leave, or begin to.
        """
        self._complete_restores()
        for holder in self._unsettled:
            if self.owner.is_live(holder):
                self.owner.seal(holder)
        self._unsettled.clear()
        self.prompt_ends.advance()
        self.turn_ends.advance()

    def _complete_restores(self) -> None:
        done = {i for i, ranks in self._num_ranks_done.items() if ranks == self._num_ranks}
        if not done:
            return
        for restore_id in done:
            del self._num_ranks_done[restore_id]
            if restore_id in self.owner.restores.orphans:
                self.owner.restores.release_orphan(restore_id)
        self.owner.side_copies.arrive(done)
        self.owner.returns.arrive(done)
        for holder in self.owner.holders():
            for index, group in enumerate(holder.groups):
                if group.restore is not None:
                    self.owner.restores.arrive(holder, index, done)

    def may_leave(self, kv: RequestKV) -> bool:
        """Return whether what a request takes with it is on the host. It must be in no step.

        Where groups keep a window or a state it is copied from the first call on, with all that has
        no copy yet. A request that cannot take all of it takes nothing, and may leave.
        """
        owner, copies = self.owner, self.owner.side_copies
        if not copies.are_needed or copies.is_kept(kv):
            return True
        copy = kv.side_copy
        if copy is None or copy.num_tokens != kv.num_tokens:
            copies.drop(kv)
            if not copies.begin(kv):
                return True
            owner.staging.drop(kv)
            owner.offload(kv, range(len(kv.groups)))
            self.write_through.note(kv)
            return False
        if copy.stage is SideStage.FAILED or not kv.mirrored:
            return True
        # Copies of full blocks that were refused, or are to be ordered anew: it does not wait.
        is_ordered = all(group.num_saves_sent >= kv.num_full_blocks for group in kv.groups)
        return copy.step > 0 and not is_ordered

    def absorb(self, feedback: StepFeedback) -> None:
        """Take in what the ranks have completed."""
        self.owner.host.open_slots(feedback.num_ready_slots)
        self._num_ranks_done.update(feedback.num_ranks_done)
        self.owner.side_copies.confirm(feedback.saved_step)
        self.owner.late_copies.confirm(feedback.saved_step)
        for holder in self.write_through.confirm(feedback.saved_step):
            self._unsettled[holder] = None
            if self.owner.is_live(holder):
                self.owner.publishing.copied(holder)

    def plan_step(self, num_tokens_after: Mapping[str, int]) -> StepTransfers:
        """Return the transfers of the step that was just scheduled.

        `num_tokens_after` has, per scheduled request, the tokens whose KV exists after it and that
        cannot be rejected any more: no fewer than before. Only they fill blocks.
        """
        owner, step = self.owner, self.owner.orders.next_step
        loading: dict[str, None] = {}
        for request_id, num_tokens in num_tokens_after.items():
            kv = owner.records[request_id].kv
            assert kv is not None
            if kv.side_copy is not None:
                owner.side_copies.drop(kv)
            num_full_before = kv.num_tokens // owner.geometry.block_size
            kv.num_tokens = num_tokens
            if kv.first_step == 0:
                kv.first_step = step
            if num_tokens // owner.geometry.block_size > num_full_before:
                if kv.mirrored:
                    self.write_through.note(kv)
                owner.publishing.filled(kv)
            loading.update((one.request_id, None) for one in (*kv.trunks, kv) if one.staging)
        saves = [*self.write_through.plan(step), *owner.side_copies.plan(step)]
        saves.extend(owner.late_copies.plan(step))
        return owner.orders.take(loading=list(loading), saves=saves)

    def drop_all_waiting(self) -> None:
        """Give up all KV of requests in the queue: their host copies, and what came back of it.

        Nor does anybody begin with cached prefixes.
        """
        for kv in [kv for kv in self.owner.kvs if kv.record.state.is_queued]:
            self.owner.forget(kv)
            self.owner.counters.num_dropped_copies += 1
        self.owner.forget_prefixes()

    @property
    def needs_steps(self) -> bool:
        """Whether there are steps to run without requests: of what has ended."""
        owner = self.owner
        return self.turn_ends.is_busy or owner.returns.is_busy or owner.late_copies.is_busy

    @property
    def is_busy(self) -> bool:
        """Whether copies are under way whose completion something may act on."""
        return (
            self.write_through.is_busy
            or self.owner.side_copies.is_busy
            or self.turn_ends.is_busy
            or bool(self.owner.late_copies.num_owned)
            or bool(self._unsettled)
            or bool(self.owner.restores.orphans)
            or self.num_restoring_blocks() > 0
        )

    def num_restoring_blocks(self) -> int:
        """Return how many blocks are on their way back in the background."""
        return (
            self.owner.returns.num_coming
            + self.owner.side_copies.num_coming_blocks
            + sum(
                len(blocks)
                for holder in self.owner.holders()
                for group in holder.groups
                if group.restore is not None
                for blocks in group.restore.under_way.values()
            )
        )

    def link_is_idle(self) -> bool:
        """Return whether nothing is on its way to the pool, nor will be in a step."""
        holders = self.owner.holders()
        return not any(one.staging for one in holders) and not self.num_restoring_blocks()

    def num_step_load_blocks(self) -> int:
        """Return how many blocks a step of all requests that are awake loads."""
        return sum(
            len(one.offloaded) * (one.staging_length - one.first)
            for one in self.owner.holders()
            if one.staging
        )

    def num_duplicate_blocks(self) -> int:
        """Return how many blocks the pool could do without if requests shared them there."""
        holders = [(own_columns(one), one.offloaded) for one in self.owner.holders()]
        return num_duplicate_blocks(holders, num_groups=self.owner.geometry.num_groups)

    def stats(self) -> KVStats | None:
        """Return where KV is now, once in a while, and at once when a copy has gone wrong or no
        request has KV: that step may be the last one for long.

        Counting takes longer than most steps' part.
        """
        self._num_stats_asked += 1
        owner, failed = self.owner, self.owner.counters.num_failures > self._reported.num_failures
        if self._num_stats_asked % STEPS_PER_STATS and owner.kvs and not failed:
            return None
        groups = [group for holder in owner.holders() for group in holder.groups]
        num_offloaded = sum(group.offloaded for group in groups)
        state = Residencies(
            num_resident_groups=len(groups) - num_offloaded,
            num_offloaded_groups=num_offloaded,
            num_restoring_groups=sum(group.restore is not None for group in groups),
            num_staging_blocks=sum(one.num_staging_blocks for one in owner.holders()),
            num_host_blocks=owner.host.num_used,
            num_free_blocks=owner.pool.get_num_free_blocks(),
            num_lagging_blocks=self.write_through.num_lagging_blocks(),
            num_quarantined_blocks=owner.quarantine.num_blocks,
            num_quarantined_slots=owner.quarantine.num_slots,
            num_anchors=len(owner.host.cache.anchors),
            num_cached_columns=owner.host.cache.num_columns,
            num_retained_columns=owner.host.cache.num_retained_columns,
            num_awaited_columns=owner.host.cache.num_awaited_columns,
            num_left_blocks=owner.blocks.num_left,
            num_duplicate_blocks=self.num_duplicate_blocks(),
            num_trunks=len(owner.trunks.all),
            num_shared_blocks=owner.trunks.num_saved_blocks,
            num_paused_requests=sum(one.state is State.PAUSED for one in owner.records.values()),
            num_parked_requests=sum(one.is_parked for one in owner.records.values()),
        )
        events = owner.counters.since(self._reported)
        self._reported = owner.counters.copy()
        return KVStats(data={"scheduler": asdict(state), "events": events})
