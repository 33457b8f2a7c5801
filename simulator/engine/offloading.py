"""vLLM's OffloadingConnector, counted: a tier on the host below the pool's prefix cache.

By vLLM 0.32 (`kv_connector/v1/offloading`, `kv_offload/cpu`): what a step fills is copied to the
host once it is computed, the least recently used going for it. A newcomer whose leading blocks are
there, behind those that the pool has, takes blocks for all of them and waits until all have come;
others pass it meanwhile. It is asked again later while one of them is still on its way to the host,
or to the pool for another. A block that comes free while its copy is under way may be taken at
once, where vLLM would wait for the copy.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from services.placement.types import EngineShape, RequestId
from simulator.device.copies import RESTORE, CopyJob, Lane
from simulator.memory.requests import SimulatedRequest


@dataclass(slots=True, kw_only=True)
class _Chunk:
    """One block of every layer group."""

    save: CopyJob
    num_loads: int = 0  # that read it now: it stays

    @property
    def is_ready(self) -> bool:
        return self.save.done_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What comes back for a request that waits."""

    request: SimulatedRequest
    first: int  # position of the first block
    keys: Sequence[Hashable]
    job: CopyJob


@dataclass(slots=True, kw_only=True)
class HostTier:
    """Blocks on the host by their keys, and what is on its way back."""

    num_chunks: int  # that there is room for, >= 0
    chunk_bytes: int
    h2d: Lane
    d2h: Lane
    _chunks: OrderedDict[Hashable, _Chunk] = field(default_factory=OrderedDict)  # oldest use first
    _loads: dict[RequestId, Load] = field(default_factory=dict)
    _coming: dict[Hashable, RequestId] = field(default_factory=dict)  # and for which request
    _num_offered: dict[RequestId, int] = field(default_factory=dict)
    _used: dict[RequestId, dict[Hashable, None]] = field(default_factory=dict)

    def is_loading(self, request_id: RequestId) -> bool:
        return request_id in self._loads

    def found(self, keys: Sequence[Hashable]) -> list[Hashable] | None:
        """Return the leading keys that are here; None: the request is to ask again later."""
        here: list[Hashable] = []
        is_pending = False
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                break
            is_pending |= not chunk.is_ready or key in self._coming
            here.append(key)
        return None if is_pending else here

    def load(self, request: SimulatedRequest, first: int, keys: Sequence[Hashable]) -> None:
        """Begin to copy what `found` has returned into the blocks that the request has taken."""
        job = CopyJob(num_bytes=len(keys) * self.chunk_bytes, priority=(RESTORE,))
        self.h2d.submit(job, self.h2d.now_s)
        self._loads[request.request_id] = Load(request=request, first=first, keys=keys, job=job)
        for key in keys:
            self._chunks[key].num_loads += 1
            self._coming[key] = request.request_id
        self._use(request.request_id, keys)

    def take_in_loads(self) -> Iterator[Load]:
        """Yield the loads that are complete, each once."""
        for load in [one for one in self._loads.values() if one.job.done_s is not None]:
            self._end_load(load)
            yield load

    def _end_load(self, load: Load) -> None:
        del self._loads[load.request.request_id]
        for key in load.keys:
            self._chunks[key].num_loads -= 1
            del self._coming[key]

    def num_offered(self, request_id: RequestId) -> int:
        """Return how many leading blocks of a request `save` has taken in."""
        return self._num_offered.get(request_id, 0)

    def save(self, request_id: RequestId, keys: Sequence[Hashable]) -> None:
        """Copy what of a request's next full blocks is not here yet.

        Nothing, until the next step, where there is no room for all of it.
        """
        new = [key for key in keys if key not in self._chunks]
        if not self._make_room(len(new), frozenset(keys)):
            return
        self._num_offered[request_id] = self.num_offered(request_id) + len(keys)
        self._use(request_id, keys)
        if new:
            job = CopyJob(num_bytes=len(new) * self.chunk_bytes)
            self.d2h.submit(job, self.d2h.now_s)
            self._chunks.update((key, _Chunk(save=job)) for key in new)

    def _make_room(self, num_new: int, offered: frozenset[Hashable]) -> bool:
        """Let the least recently used go; False, and none does, where too few can."""
        num_lacking = len(self._chunks) + num_new - self.num_chunks
        if num_lacking <= 0:
            return True
        idle = (
            key
            for key, chunk in self._chunks.items()
            if chunk.is_ready and not chunk.num_loads and key not in offered
        )
        going = [key for key, _ in zip(idle, range(num_lacking), strict=False)]
        if len(going) < num_lacking:
            return False
        for key in going:
            del self._chunks[key]
        return True

    def _use(self, request_id: RequestId, keys: Sequence[Hashable]) -> None:
        self._used.setdefault(request_id, {}).update(dict.fromkeys(keys))

    def ended(self, request_id: RequestId) -> None:
        """Take in a request's end: what it used was used now, its first blocks last."""
        if load := self._loads.get(request_id):
            load.job.cancelled = True
            self._end_load(load)
        self._num_offered.pop(request_id, None)
        for key in reversed(list(self._used.pop(request_id, ()))):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def check_integrity(self) -> None:
        """Raise AssertionError if there is more than has room, or another load than is counted."""
        assert len(self._chunks) <= self.num_chunks
        assert sum(chunk.num_loads for chunk in self._chunks.values()) == len(self._coming)
        assert sum(len(load.keys) for load in self._loads.values()) == len(self._coming)


def host_tier(shape: EngineShape, h2d: Lane, d2h: Lane) -> HostTier:
    """Return a tier that has all of an engine's host memory for KV."""
    return HostTier(
        num_chunks=shape.num_host_blocks // shape.num_groups,
        chunk_bytes=shape.num_groups * shape.block_bytes,
        h2d=h2d,
        d2h=d2h,
    )
