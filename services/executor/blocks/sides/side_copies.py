"""What goes with a request that leaves the pool, where groups keep a window or a state.

Full blocks go to the host as they fill. A window slides, a state changes with each token, and where
there are states a request comes back at the very token: so its windows, its states and the open
block of each group that may leave are copied once no step of it is in flight. It keeps its blocks
until the copies are complete. With its next step they belong to another number of tokens, and end.
Those of a *prompt copy* are for requests to come, and stay.

Slots, orders and links are those of full blocks: the pages of all groups are the same memory.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.control.prefixes.anchors import Anchor
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.residency import RequestKV, SideCopy, SideStage
from services.executor.blocks.restores import Restores
from services.executor.blocks.sides.side_groups import SideGroups
from services.executor.step_messages import FoundOrder, SaveOrder
from services.placement.blocks import BlockGeometry, side_blocks, side_copy_positions


class SideCopies:
    """Makes side copies, and brings them back.

        copies.begin(kv)  # it is in no step; `plan` has the orders
        copies.begin_prompt(kv, tokens)  # the same, of one that goes on once the copy is kept
        copies.is_kept(kv)  # after `confirm`: it may leave
        copies.bring_back(kv, max_blocks=40)
        copies.show(kv)  # after `arrive`: its rows have it again

    What it takes of pool and host, `BlockOwner` counts as the request's.
    """

    def __init__(
        self, sides: SideGroups, host: HostPool, restores: Restores, geometry: BlockGeometry
    ) -> None:
        self._sides, self._host, self._restores = sides, host, restores
        self._geometry = geometry
        self._leaving: dict[SideCopy, RequestKV] = {}
        self._coming: dict[RequestKV, None] = {}

    @property
    def is_busy(self) -> bool:
        """Whether copies to the host are under way."""
        return bool(self._leaving)

    @property
    def num_coming_blocks(self) -> int:
        """Return how many blocks are on their way back."""
        copies = [kv.side_copy for kv in self._coming]
        return sum(len(blocks) for one in copies if one for blocks in one.under_way.values())

    @property
    def are_needed(self) -> bool:
        """Whether full blocks alone bring no request back."""
        return bool(self._sides.windows)

    # -- to the host --------------------------------------------------------------------------

    def begin(self, kv: RequestKV) -> bool:
        """Begin to copy what a request has; False if the host has no room for all of it."""
        kv.side_copy = SideCopy(num_tokens=kv.num_tokens, stage=SideStage.FAILED)
        num_more = sum(kv.num_full_blocks - len(group.host_slots) for group in kv.groups)

        def take(num_slots: int) -> list[int] | None:
            has_room = self._host.can_take(kv.promise, num_slots + num_more)
            return self._host.take(kv.promise, num_slots) if has_room else None

        return kv.mirrored and self._begin(kv, kv.side_copy, take)

    def begin_prompt(self, kv: RequestKV, tokens: tuple[int, ...]) -> bool:
        """Begin to copy what a request has whose prompt ends with `tokens`, behind full blocks.

        In room that was promised to no request, nor is for what is kept; False if there is too
        little.
        """
        kv.prompt_copy = SideCopy(num_tokens=kv.num_tokens, stage=SideStage.FAILED, tokens=tokens)
        return self._begin(kv, kv.prompt_copy, self._host.take_spare)

    def _begin(
        self, kv: RequestKV, copy: SideCopy, take: Callable[[int], list[int] | None]
    ) -> bool:
        positions = side_copy_positions(self._geometry, num_tokens=kv.num_tokens)
        slots = take(sum(map(len, positions)))
        if slots is None:
            return False
        self._sides.slide(kv.request_id, num_tokens=kv.num_tokens)
        copy.positions, copy.stage = positions, SideStage.LEAVES
        copy.slots = [[slots.pop() for _ in stretch] for stretch in positions]
        copy.uids = [[kv.uid(position) for position in stretch] for stretch in positions]
        self._leaving[copy] = kv
        return True

    def plan(self, step: int) -> list[SaveOrder]:
        """Return the copies that begin with a step."""
        saves = []
        for copy, kv in self._leaving.items():
            if not copy.step:
                copy.step = step
                saves.extend(self._saves(kv, copy))
        return saves

    def _saves(self, kv: RequestKV, copy: SideCopy) -> list[SaveOrder]:
        rows = [*(group.row for group in kv.groups), *self._sides.rows(kv.request_id)]
        return [
            SaveOrder(
                kv.request_id,
                index,
                list(copy.uids[index]),
                list(copy.slots[index]),
                [block.block_id for block in row[stretch.start : stretch.stop]],
                from_staging=False,
            )
            for index, (stretch, row) in enumerate(zip(copy.positions, rows, strict=True))
            if stretch
        ]

    def fail(self, saves: Collection[tuple[int, str, int]]) -> None:
        """Give up what saves were part of that did not succeed, by step, request and group."""
        failed = {(step, name) for step, name, _ in saves}
        for copy, kv in list(self._leaving.items()):
            if (copy.step, kv.request_id) not in failed:
                continue
            nothing = SideCopy(num_tokens=copy.num_tokens, stage=SideStage.FAILED)
            if copy is kv.side_copy:
                self.drop(kv)
                kv.side_copy = nothing
            else:
                self.drop_prompt(kv)
                kv.prompt_copy = nothing

    def confirm(self, saved_step: int) -> None:
        """Count the copies of all steps up to `saved_step` as complete."""
        for copy in list(self._leaving):
            if 0 < copy.step <= saved_step:
                copy.stage = SideStage.KEPT
                del self._leaving[copy]

    def is_kept(self, kv: RequestKV) -> bool:
        """Return whether all of a request is on the host, as its next step would find it."""
        copy = kv.side_copy
        if not self.are_needed:
            return True
        if copy is None or copy.stage is not SideStage.KEPT or copy.num_tokens != kv.num_tokens:
            return False
        return kv.mirrored and kv.num_host_blocks == kv.num_full_blocks

    # -- and back -----------------------------------------------------------------------------

    def num_to_come(self, kv: RequestKV, *, num_tokens: int) -> int:
        """Return how many blocks more its side groups own at most, on its way to `num_tokens`.

        Less what it has taken for the open blocks that come back with them.
        """
        copy = kv.side_copy
        if copy is None or self._sides.num_owned_by(kv.request_id):
            return self._sides.num_to_come(kv.request_id, num_tokens=num_tokens)
        num_new = num_tokens - copy.num_tokens
        most = side_blocks(self._geometry, num_tokens=num_tokens, num_new_tokens=num_new)
        return most - sum(map(len, copy.targets))

    def num_lacking(self, kv: RequestKV) -> int:
        """Return how many blocks `bring_back` has yet to take."""
        copy = kv.side_copy
        return 0 if copy is None or copy.stage is not SideStage.KEPT else copy.num_blocks

    def is_coming(self, kv: RequestKV) -> bool:
        """Return whether blocks are still to be taken, or to be filled."""
        copy = kv.side_copy
        return copy is not None and (copy.stage is SideStage.KEPT or bool(copy.under_way))

    def bring_back(self, kv: RequestKV, *, max_blocks: int) -> int:
        """Take blocks and order copies to them, all or none; return how many were taken."""
        copy, num_blocks = kv.side_copy, self.num_lacking(kv)
        if copy is None or not 0 < num_blocks <= max_blocks:
            return 0
        found = self._find(copy)  # all of it before anything is loaded, into what was left first
        for index, here in enumerate(found):
            copy.targets.append(self._target(kv, copy, index, here))
        copy.stage = SideStage.COMES
        self._coming[kv] = None
        return num_blocks

    def _find(self, copy: SideCopy) -> list[list[KVCacheBlock | None]]:
        """Take what free blocks of the pool still hold of a copy; None for the rest."""
        if copy.anchor is None:
            return [[None] * len(stretch) for stretch in copy.positions]
        found = iter(self._restores.blocks.find_anchor(copy.anchor))
        return [[next(found) for _ in stretch] for stretch in copy.positions]

    def _target(
        self, kv: RequestKV, copy: SideCopy, index: int, found: Sequence[KVCacheBlock | None]
    ) -> list[KVCacheBlock]:
        """Return the blocks that a group comes back to; copies to those not found are ordered."""
        uids, slots = copy.uids[index], copy.slots[index]
        ordered, blocks = self._restores.order_lacking(kv.request_id, index, found, uids, slots)
        copy.under_way.update(ordered)
        if here := [n for n, block in enumerate(found) if block is not None]:
            its = ([uids[n] for n in here], [slots[n] for n in here])
            ids = [blocks[n].block_id for n in here]
            self._restores.note_found(FoundOrder(kv.request_id, index, *its, ids))
        return blocks

    def num_to_load(self, kv: RequestKV) -> int:
        """Return how many blocks of `num_lacking` are copied, as it looks now."""
        anchor = kv.side_copy and kv.side_copy.anchor
        num_left = self._restores.blocks.num_left_of(anchor) if anchor else 0
        return max(0, self.num_lacking(kv) - num_left)

    def arrive(self, done: Collection[int]) -> None:
        """Take in which orders every rank has carried out."""
        for kv in self._coming:
            assert kv.side_copy is not None
            for restore_id in kv.side_copy.under_way.keys() & done:
                del kv.side_copy.under_way[restore_id]

    def whose(self, restore_id: int) -> RequestKV | None:
        """Return the request whose copy an order brings back; None: no order of this number."""
        return next(
            (kv for kv in self._coming if kv.side_copy and restore_id in kv.side_copy.under_way),
            None,
        )

    def show(self, kv: RequestKV) -> None:
        """Let a request that wakes up have what has come back, and all of its tokens."""
        copy = kv.side_copy
        if copy is None or copy.stage is not SideStage.COMES:
            return
        assert not copy.under_way, f"{kv.request_id} wakes up before all of it is there"
        targets, copy.targets = copy.targets, []
        for group, opened in zip(kv.groups, targets, strict=False):
            if group.offloaded:
                group.own.update(enumerate(opened, len(group.row)))
            group.row.extend(opened)
        self._sides.put(kv.request_id, targets[len(kv.groups) :], num_tokens=copy.num_tokens)
        kv.num_tokens, copy.stage = copy.num_tokens, SideStage.BACK
        del self._coming[kv]

    def put_back(self, kv: RequestKV) -> None:
        """Give back the blocks that a request came back to; the copy stays."""
        copy = kv.side_copy
        if copy is None or copy.stage is SideStage.KEPT:
            return
        if copy.stage is SideStage.COMES:
            self._let_go(kv, copy)
        else:
            num_full, opened = kv.num_full_blocks, []
            for group in kv.groups:
                opened.extend(group.row[num_full:])
                del group.row[num_full:]
                group.own.pop(num_full, None)
            kv.num_tokens = num_full * kv.block_size
            blocks = self._restores.blocks
            blocks.release(opened)
            blocks.pool.free_blocks(self._sides.pop(kv.request_id))
        copy.stage = SideStage.KEPT

    def _let_go(self, kv: RequestKV, copy: SideCopy) -> None:
        for index in range(len(copy.targets)):
            self._restores.orders.forget_found((kv.request_id, index))
        self._restores.let_go([b for blocks in copy.targets for b in blocks], copy.under_way)
        copy.targets, copy.under_way = [], {}
        self._coming.pop(kv, None)

    def drop(self, kv: RequestKV) -> None:
        """End a copy: its request goes on, or ends. Copies under way run out."""
        copy = kv.side_copy
        if copy is None:
            return
        self._let_go(kv, copy)
        self._host.give_back(copy.own_slots)
        if copy.anchor is not None:
            self._host.give_back(self._host.cache.anchors.release(copy.anchor))
        self._leaving.pop(copy, None)
        kv.side_copy = None

    def leave(self, kv: RequestKV, anchor: Anchor) -> None:
        """Let whoever begins with an anchor find what a request that ends has of it in the pool."""
        num_groups, positions = len(kv.groups), anchor.copy.positions
        blocks = [
            group.own.pop(position)
            for group, stretch in zip(kv.groups, positions, strict=False)
            for position in stretch
        ]
        blocks.extend(self._sides.hand_over(kv.request_id, positions[num_groups:]))
        self._restores.blocks.leave_anchor(anchor, blocks)

    def drop_prompt(self, kv: RequestKV) -> None:
        """End the copy of where a prompt ended; the anchor that it has become stays."""
        copy, kv.prompt_copy = kv.prompt_copy, None
        if copy is not None:
            self._host.give_back(copy.own_slots)
            self._leaving.pop(copy, None)

    def forget(self, kv: RequestKV) -> None:
        """End all copies of a request."""
        self.drop(kv)
        self.drop_prompt(kv)

    def hand_over(self, old: RequestKV, parked: RequestKV) -> None:
        """Let a parked request have the copies that `old` had, but for one under way."""
        old.side_copy = None
        if old.prompt_copy is not None and old.prompt_copy.stage is not SideStage.LEAVES:
            old.prompt_copy = None
        else:
            parked.prompt_copy = None

    def check_integrity(self, kvs: Mapping[RequestKV, None]) -> None:
        """Assert that copies are where they say."""
        for kv in kvs:
            for one in kv.side_copies:
                assert (one.stage is SideStage.LEAVES) == (one in self._leaving)
                assert [len(slots) for slots in one.slots] == [len(row) for row in one.positions]
            copy = kv.side_copy
            if copy is None:
                continue
            stage = copy.stage
            assert (stage is SideStage.COMES) == (kv in self._coming)
            assert bool(copy.targets) == (stage is SideStage.COMES), "blocks of no copy"
            runs = not kv.record.state.is_queued
            has_rows = bool(self._sides.num_owned_by(kv.request_id))
            assert has_rows == (runs or stage is SideStage.BACK), f"{kv.request_id}: {stage}"
        assert {*self._leaving.values(), *self._coming} <= kvs.keys(), "a copy of none"
