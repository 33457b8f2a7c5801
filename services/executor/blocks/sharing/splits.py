"""Splits: what a holder has before some position becomes a trunk of its users'.

Blocks do not move and their ids do not change. Both parts are where the whole was, layer group by
layer group; groups that come back in part begin that anew.
"""

from collections.abc import Callable

from services.control.prefixes.trunks import own_columns, put_before
from services.executor.blocks.holder import GroupKV, Holder, Restore
from services.executor.blocks.residency import Trunk, users_of
from services.executor.blocks.restores import Restores
from services.executor.blocks.seals import Seals
from services.placement.layer_placement import LayerPlacement


class Splits:
    """Cuts holders in two."""

    def __init__(self, restores: Restores, seals: Seals) -> None:
        self.on_split: Callable[[Holder, Trunk], None] = lambda holder, trunk: None
        self._restores, self._seals = restores, seals
        self._blocks, self._orders = restores.blocks, restores.orders
        self._staging = restores.staging
        self._last_number = 0

    def new_name(self) -> str:
        """Return a name for a trunk: no request is called that."""
        self._last_number += 1
        return f"\0trunk-{self._last_number}"

    def split(self, holder: Holder, end: int) -> Trunk:
        """Make what a holder has before `end` a trunk of its users'."""
        was_coming = self._stop_restores(holder, end)
        is_on_host = holder.num_copied_blocks >= end
        trunk = Trunk(
            name=self.new_name(),
            groups=[self._cut(group, end) for group in holder.groups],
            mirrored=is_on_host,
            block_size=holder.block_size,
            wanted_staging=holder.wanted_staging,
            columns=holder.columns[:end],
            staging=[buffer[:end] for buffer in holder.staging],
            num_tokens=end * holder.block_size,
            asleep=holder.asleep,
            users={},
            floor=_floor_of(holder),
        )
        self._clear_staging(holder, end)
        put_before(holder, trunk, users_of(holder))
        for column in own_columns(trunk):
            column.holder = trunk
        self.on_split(holder, trunk)
        self._tell_ranks(holder, trunk)
        for index in was_coming:
            for part in (trunk, holder):
                self._restores.begin_in_parts(part, index)
        self._complete_empty(holder)
        for part in (trunk, holder):
            self._seals.seal(part)
        return trunk

    def _clear_staging(self, holder: Holder, end: int) -> None:
        """Let a holder's buffers show nothing before `end`; on the ranks what is there is void."""
        nothing = [self._blocks.null] * end
        for number, buffer in enumerate(holder.staging):
            is_short = len(buffer) < end
            buffer[:end] = nothing
            if is_short:
                ids = (block.block_id for block in nothing)
                self._orders.fill_staging(holder.request_id, number, 0, ids)

    def _stop_restores(self, holder: Holder, end: int) -> list[int]:
        """Give up the copies of groups that come back in part; return those to begin anew.

        Where all of a holder becomes the trunk, they go on.
        """
        coming = holder.restoring if end < holder.num_rows else []
        for index in coming:
            self._restores.cancel(holder, index)
        is_on_its_way = holder.asleep and any(u.record.is_prepared for u in users_of(holder))
        return coming if is_on_its_way else []

    def _cut(self, group: GroupKV, end: int) -> GroupKV:
        """Take from a group what is before `end`."""
        null = self._blocks.null
        front = GroupKV(
            row=group.row[:end],
            first=group.first,
            offloaded=group.offloaded,
            own={
                position: group.own.pop(position)
                for position in sorted(group.own)
                if position < end
            },
            host_slots=group.host_slots[:end],
            num_saves_sent=min(end, group.num_saves_sent),
            num_host_blocks=min(end, group.num_host_blocks),
            restore=group.restore,
            num_failed_restores=group.num_failed_restores,
            restore_from_step=group.restore_from_step,
            buffer=group.buffer,
        )
        group.row[:end] = [null] * end
        group.first = end
        group.num_saves_sent = max(end, group.num_saves_sent)
        group.num_host_blocks = max(end, group.num_host_blocks)
        if group.restore is not None:
            group.restore = Restore()
        return front

    def _tell_ranks(self, holder: Holder, trunk: Trunk) -> None:
        """Say of both parts all that ranks must know: what was pending of the whole is void."""
        orders = self._orders
        orders.split(holder.request_id, trunk.name, trunk.end)
        orders.begin_with(trunk)
        if not trunk.staging:
            return
        orders.set_staging(trunk.name, len(trunk.staging))
        for number, buffer in enumerate(trunk.staging):
            ids = [block.block_id for block in buffer]
            orders.fill_staging(trunk.name, number, 0, ids)
        for index in trunk.offloaded:
            self._staging.load_anew(trunk, index)
            self._staging.load_anew(holder, index)

    def _complete_empty(self, holder: Holder) -> None:
        """Take in that nothing of a holder is left to come back."""
        for index in holder.restoring if holder.num_rows == holder.first else ():
            self._restores.complete(holder, index)


def _floor_of(holder: Holder) -> LayerPlacement | None:
    if isinstance(holder, Trunk):
        return holder.floor
    (user,) = users_of(holder)
    return user.record.floor
