"""Turns the scheduler's decisions into each step's transfers, and feedback into state.

The scheduler side of the connector: after a step is scheduled, `plan_step` says what the ranks
copy in it; when its feedback arrives, `absorb` counts what is complete; before the next step is
scheduled, `settle` acts on it.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict

from services.executor.kv.block_owner import BlockOwner
from services.executor.kv.metadata import SaveOrder, StepFeedback, StepTransfers
from services.executor.kv.residency import GroupKV, RequestKV
from services.executor.kv.stats import KVStats, Residencies

STEPS_PER_STATS = 32


class TransferPlanner:
    """Decides what is copied in each step, and knows what has been."""

    def __init__(
        self, owner: BlockOwner, *, num_ranks: int, max_mirrored_blocks_per_step: int
    ) -> None:
        self.owner = owner
        self._num_ranks = num_ranks
        # Of resident groups (write-through); what offloaded groups fill is always copied.
        self._max_mirrored = max_mirrored_blocks_per_step
        self._unconfirmed: deque[tuple[int, RequestKV, GroupKV, int]] = deque()  # in step order
        self._lagging: dict[str, RequestKV] = {}  # full blocks whose copy was not yet ordered
        self._unsettled: dict[str, RequestKV] = {}
        self._num_ranks_done: Counter[int] = Counter()
        self._num_stats_asked = 0

    def relieve(self) -> bool:
        """Give up restores for want of blocks; return whether blocks will come free by themselves.

        They will if a copy is under way whose completion gives blocks back.
        """
        for request in self.owner.requests.values():
            for index in range(len(request.groups)):
                if self.owner.restores.cancel(request, index):
                    self._unsettled[request.request_id] = request
        return bool(self.owner.restores.orphans or self._unsettled) or any(
            group.stages for _, request, group, _ in self._unconfirmed if self._is_live(request)
        )

    def settle(self) -> None:
        """Act on completed copies: seal blocks, flip restored rows, end cancelled restores."""
        self._complete_restores()
        for request in self._unsettled.values():
            if self._is_live(request):
                self.owner.seal(request)
        self._unsettled.clear()

    def _complete_restores(self) -> None:
        done = {i for i, ranks in self._num_ranks_done.items() if ranks == self._num_ranks}
        if not done:
            return
        for restore_id in done:
            del self._num_ranks_done[restore_id]
            if restore_id in self.owner.restores.orphans:
                self.owner.restores.release_orphan(restore_id)
        for request in self.owner.requests.values():
            for index, group in enumerate(request.groups):
                if group.restore is not None and group.restore.restore_id in done:
                    self.owner.restores.complete(request, index)

    def absorb(self, feedback: StepFeedback) -> None:
        """Take in what the ranks have completed."""
        self.owner.host.open_slots(feedback.num_ready_slots)
        self._num_ranks_done.update(feedback.num_ranks_done)
        while self._unconfirmed and self._unconfirmed[0][0] <= feedback.saved_step:
            _, request, group, num_blocks = self._unconfirmed.popleft()
            group.num_host_blocks = max(group.num_host_blocks, num_blocks)
            self._unsettled[request.request_id] = request

    def retract_save(self, step: int, request_id: str, index: int) -> bool | None:
        """Take back a save that did not succeed and the group's later ones, to order them anew.

        False, and nothing changed, if there is no such save any more; None, and nothing changed,
        if blocks are among them that exist nowhere else.
        """
        request = self.owner.requests.get(request_id)
        if request is None:
            return False
        group = request.groups[index]
        saves = [(sent, end) for sent, _, owner, end in self._unconfirmed if owner is group]
        if all(sent != step for sent, _ in saves):
            return False
        num_kept = max([group.num_host_blocks, *(end for sent, end in saves if sent < step)])
        if any(position >= num_kept for position in group.staged_positions()):
            return None
        self._unconfirmed = deque(
            save for save in self._unconfirmed if save[2] is not group or save[0] < step
        )
        self.owner.retract_saves(group, num_kept)
        self._lagging[request_id] = request
        return True

    def unmirror(self, request: RequestKV) -> None:
        """Make no more host copies of a request without offloaded groups, and forget the rest."""
        self._unconfirmed = deque(save for save in self._unconfirmed if save[1] is not request)
        self._lagging.pop(request.request_id, None)
        self.owner.unmirror(request)

    def plan_step(self, num_tokens_after: Mapping[str, int]) -> StepTransfers:
        """Return the transfers of the step that was just scheduled.

        `num_tokens_after` has, per scheduled request, the tokens whose KV exists after it.
        """
        owner, step = self.owner, self.owner.orders.next_step
        loading = []
        for request_id, num_tokens in num_tokens_after.items():
            request = owner.requests[request_id]
            num_full_before = request.num_tokens // owner.geometry.block_size
            request.num_tokens = num_tokens
            if request.mirrored and num_tokens // owner.geometry.block_size > num_full_before:
                self._lagging[request_id] = request
            if request.staging:
                loading.append(request_id)
        saves = self._plan_saves(step)
        transfers = owner.orders.take(loading=loading, saves=saves)
        # What a step writes to staging itself is loaded from the step after it.
        for save in saves:
            if save.from_staging:
                owner.orders.extend_table(save)
        return transfers

    def note_offloaded(self, request: RequestKV) -> None:
        """Order the copies that newly offloaded groups still lack."""
        self._lagging[request.request_id] = request

    def _plan_saves(self, step: int) -> list[SaveOrder]:
        saves: list[SaveOrder] = []
        num_left = self._max_mirrored
        for request in list(self._lagging.values()):
            if not self._is_live(request):
                del self._lagging[request.request_id]
                continue
            if num_left <= 0 and not request.staging:
                continue  # write-through goes on in a later step
            num_full = request.num_tokens // self.owner.geometry.block_size
            caught_up = True
            for index, group in enumerate(request.groups):
                num_new = num_full - group.num_saves_sent
                if not group.offloaded:
                    num_new = min(num_new, num_left)
                    num_left -= max(0, num_new)
                end = group.num_saves_sent + num_new
                if num_new > 0 and self.owner.prepare_save(request, group, end):
                    saves.extend(self._order_saves(request, index, end))
                    self._unconfirmed.append((step, request, group, end))
                caught_up = caught_up and group.num_saves_sent >= num_full
            if caught_up:
                del self._lagging[request.request_id]
        return saves

    def _order_saves(self, request: RequestKV, index: int, end: int) -> list[SaveOrder]:
        """Order copies of one group's blocks up to `end`, own and staging blocks apart."""
        group = request.groups[index]
        orders = [
            SaveOrder(request.request_id, index, [], [], [], from_staging)
            for from_staging in (False, True)
        ]
        for position in range(group.num_saves_sent, end):
            order = orders[group.offloaded and position not in group.own]
            order.positions.append(position)
            order.slots.append(group.host_slots[position])
            order.block_ids.append(group.row[position].block_id)
        group.num_saves_sent = end
        return [order for order in orders if order.slots]

    def stats(self) -> KVStats | None:
        """Return where KV is now, once in a while: counting takes longer than most steps' part."""
        self._num_stats_asked += 1
        if self._num_stats_asked % STEPS_PER_STATS:
            return None
        owner = self.owner
        groups = [group for request in owner.requests.values() for group in request.groups]
        num_offloaded = sum(group.offloaded for group in groups)
        state = Residencies(
            num_resident_groups=len(groups) - num_offloaded,
            num_offloaded_groups=num_offloaded,
            num_restoring_groups=sum(group.restore is not None for group in groups),
            num_staging_blocks=sum(
                len(buffer) for request in owner.requests.values() for buffer in request.staging
            ),
            num_host_blocks=owner.host.num_used,
            num_free_blocks=owner.pool.get_num_free_blocks(),
            num_sealed_blocks=owner.num_sealed_blocks,
            num_restored_groups=owner.restores.num_restored_groups,
        )
        return KVStats(data={"scheduler": asdict(state)})

    def _is_live(self, request: RequestKV) -> bool:
        return self.owner.requests.get(request.request_id) is request
