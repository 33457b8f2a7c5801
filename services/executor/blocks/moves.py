"""The moves of layer groups that the capacity guard orders, on real blocks."""

from collections.abc import Collection, Iterable, Sequence

from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfer_planner import TransferPlanner
from services.placement.blocks import BlockGeometry


class BlockMoves:
    """`Moves` over a `BlockOwner`."""

    def __init__(self, owner: BlockOwner, transfers: TransferPlanner) -> None:
        self._owner, self._transfers = owner, transfers

    @property
    def geometry(self) -> BlockGeometry:
        return self._owner.geometry

    @property
    def num_blocks(self) -> int:
        num_blocks: int = self._owner.pool.num_gpu_blocks - 1  # one is vLLM's null block
        return num_blocks

    @property
    def num_free(self) -> int:
        return self._owner.blocks.num_free

    def find(self, request_id: str) -> RequestKV | None:
        return self._owner.requests.get(request_id)

    def all(self) -> Iterable[RequestKV]:
        return self._owner.requests.values()

    def idle(self, but: Collection[str]) -> list[RequestKV]:
        others = [kv for name, kv in self._owner.requests.items() if name not in but]
        return self._transfers.write_through.by_likelihood(others) if others else others

    def num_new(self, kv: RequestKV, num_tokens: int) -> int:
        return self._owner.num_new_blocks(kv, num_tokens=num_tokens)

    def num_to_wake(self, kv: RequestKV) -> int:
        return self._owner.staging.num_to_wake(kv)

    def offload(self, kv: RequestKV, groups: Sequence[int]) -> None:
        self._owner.offload(kv, groups)
        self._transfers.note_offloaded(kv)

    def restore(self, kv: RequestKV, group: int) -> None:
        self._owner.restores.begin(kv, group)

    def set_staging(self, kv: RequestKV, num_buffers: int) -> None:
        self._owner.staging.set_number(kv, num_buffers)

    def sleep(self, kv: RequestKV) -> None:
        self._owner.staging.drop(kv)

    def give_up_restores(self) -> bool:
        return self._transfers.relieve()
