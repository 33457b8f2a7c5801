"""The moves of layer groups that the capacity guard orders, on counted blocks."""

from collections.abc import Callable, Collection, Iterable, Sequence

from services.placement.blocks import BlockGeometry
from services.placement.types import RequestId
from simulator.blocks import BlockLedger
from simulator.copies import Lane
from simulator.kv import KVState
from simulator.requests import LiveRequest


class CountedMoves:
    """`Moves` over requests' `KVState`."""

    def __init__(
        self,
        pool: BlockLedger,
        geometry: BlockGeometry,
        live: Callable[[], Sequence[LiveRequest]],
        h2d: Lane,
        *,
        block_bytes: int,
    ) -> None:
        """`live`: all requests that have not ended, those that run first."""
        self.requests: dict[RequestId, LiveRequest] = {}  # the same, by id
        self.num_offloads = 0  # groups that left the pool, since the start
        self.pool, self.h2d = pool, h2d
        self._geometry, self._live, self.block_bytes = geometry, live, block_bytes

    @property
    def geometry(self) -> BlockGeometry:
        return self._geometry

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def find(self, request_id: str) -> KVState | None:
        request = self.requests.get(RequestId(request_id))
        if request is None or not (request.kv.num_tokens or request_id in self.pool.owned):
            return None
        return request.kv

    def all(self) -> Iterable[KVState]:
        return (request.kv for request in self.requests.values())

    def idle(self, but: Collection[str]) -> list[KVState]:
        others = [r for r in self._live() if r.kv.num_owned and r.request_id not in but]
        others = sorted(reversed(others), key=lambda request: -request.num_deposited_told)
        return [request.kv for request in others]

    def num_new(self, kv: KVState, num_tokens: int) -> int:
        return kv.num_new(num_tokens)

    def num_to_wake(self, kv: KVState) -> int:
        return kv.num_to_wake

    def offload(self, kv: KVState, groups: Sequence[int]) -> None:
        kv.offload(groups, num_free=self.pool.num_free)
        self.num_offloads += len(groups)
        self.refresh(kv)

    def restore(self, kv: KVState, group: int) -> None:
        self.h2d.submit(kv.begin_restore(group, self.block_bytes), self.h2d.now_s)
        self.refresh(kv)

    def set_staging(self, kv: KVState, num_buffers: int) -> None:
        kv.set_buffers(num_buffers, num_free=self.pool.num_free)
        self.refresh(kv)

    def sleep(self, kv: KVState) -> None:
        kv.sleep()
        self.refresh(kv)

    def give_up_restores(self) -> bool:
        num_free = self.pool.num_free
        for kv in self.all():
            if kv.cancel_restores():
                kv.seal()
                self.refresh(kv)
        return self.pool.num_free > num_free or any(
            kv.num_staging_groups and kv.saves for kv in self.all()
        )

    def refresh(self, kv: KVState) -> None:
        """Let the ledger follow a change of a request's KV that finds its blocks free."""
        taken = self.pool.set_owned(RequestId(kv.request_id), kv.num_owned)
        assert taken, "blocks were taken that were not free"
