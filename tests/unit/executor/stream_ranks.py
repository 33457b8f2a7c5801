"""Simulated ranks whose model and copies run on streams: the real device engine, late.

A block's content is a number in its page. What the model writes and reads is enqueued on the
compute stream, step after step, while nothing there may have run yet.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lab.fake_streams import Clock, FakeDevice
from services.executor.copies.copy_engine import Copy
from services.executor.copies.copy_job import CopyJob
from services.executor.copies.device.integrity_guard import IntegrityGuard
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.pages import GroupPages
from services.executor.copies.transfer_runner import TransferRunner
from services.executor.kv_options import GuardMode
from services.executor.step_messages import StepFeedback, StepTransfers
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, Content, SimulatedRank, Slice

PAGE_BYTES = 8  # one number
BLOCKS_PER_CHUNK = 2

KV = tuple[str, int]  # a request, and which beginning of it


class RequestsDevice(FakeDevice):
    """Knows for whom copies read: what is read for a request that has ended is of no use.

    Copies of its blocks may go on, so anybody may write what they read, and they may read what
    anybody writes.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._ended: set[KV] = set()
        self._num_ends: Counter[str] = Counter()
        # Whose each row of a job is, by the identity of the job's own array; jobs are kept alive.
        self._owners: dict[int, dict[int, KV]] = {}
        self._jobs: list[CopyJob] = []
        # The last read of a row by a stream: the job's rows, and which of them.
        self._readers: dict[tuple[int, int], tuple[Any, int]] = {}

    def note(self, copy: Copy, job: CopyJob) -> None:
        owners = [
            (who.request_id, self._num_ends[who.request_id])
            for who in copy.identities
            for _ in who.uids
        ]
        for rows in (job.slots, job.block_ids):
            self._owners[id(rows)] = dict(zip(rows.tolist(), owners, strict=False))
        self._jobs.append(job)

    def end(self, request_id: str) -> None:
        """Forget what is being read for a request that ends, now and later."""
        with self.lock:
            self._ended.add((request_id, self._num_ends[request_id]))
            self._num_ends[request_id] += 1
            for (address, stream), (rows, row) in list(self._readers.items()):
                if self._owner(rows, row) in self._ended:
                    self._accesses[address].reads.pop(stream, None)
                    del self._readers[address, stream]

    def _owner(self, rows: Any, row: int) -> KV | None:
        # Rows of a chunk are a view of its job's; those of the model, and new jobs', nobody knows.
        owners = self._owners.get(id(getattr(rows, "base", None)), {})
        return owners.get(int(row))

    def _read(
        self, rows: torch.Tensor, indices: Sequence[int], stream: int, clock: Clock, known: Clock
    ) -> None:
        useful = [row for row in indices if self._owner(indices, row) not in self._ended]
        super()._read(rows, useful, stream, clock, known)
        for row in useful:
            address = rows.data_ptr() + int(row) * rows.stride(0)
            self._readers[address, stream] = (indices, row)


class StreamRank(SimulatedRank):
    """A rank as the executor runs it on a device."""

    def __init__(self, num_groups: int, rng: random.Random, *, guarded: bool = False) -> None:
        super().__init__(num_groups, rng)
        self.device = RequestsDevice(rng.randrange(1 << 30))
        self.mistakes: list[str] = []
        self._numbers: dict[Content, int] = {None: 0}
        self._pool = torch.zeros((200, PAGE_BYTES), dtype=torch.uint8)
        host = torch.zeros((500, PAGE_BYTES), dtype=torch.uint8)
        pages = [GroupPages(pool=(self._pool,), host=(host,)) for _ in range(num_groups)]
        self.engine = StreamEngine(pages, self.device)
        guard = None
        if guarded:
            guard = IntegrityGuard(self.engine, pages, num_slots=len(host), mode=GuardMode.ALL)
        self.runner = TransferRunner(guard or self.engine, num_groups, late_guard=guard)
        self.runner.fill = lambda ids, nan: self._poison(ids) if nan else None

    @property
    def faults(self) -> list[str]:
        return self.mistakes + self.device.races

    def close(self) -> None:
        self.engine.close()
        self.device.finish()

    def run_step(self, transfers: StepTransfers, batch: list[Slice]) -> StepFeedback:
        for request_id, group in transfers.dropped_tables:
            if group is None and request_id in self.rows:
                self.device.end(request_id)
        return super().run_step(transfers, batch)

    def _poison(self, block_ids: list[int]) -> None:
        self.device.write(self._pool, block_ids, self._put(block_ids, None))

    def _write(self, group: int, part: Slice) -> None:
        end = part.start + part.num_tokens
        for position in range(part.start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            block_id = self.rows[part.request_id][group][position]
            content = (part.request_id, group, position)
            if position * BLOCK_SIZE < part.start:
                self.device.read(self._pool, [block_id], self._check(block_id, content, "open"))
            self.device.write(self._pool, [block_id], self._put([block_id], content))

    def _read(self, group: int, part: Slice) -> None:
        end = part.start + part.num_tokens
        for position in range(-(-end // BLOCK_SIZE)):
            block_id = self.rows[part.request_id][group][position]
            content = (part.request_id, group, position)
            self.device.read(self._pool, [block_id], self._check(block_id, content, "read"))

    def _put(self, block_ids: list[int], content: Content) -> Callable[[], None]:
        number = self._numbers.setdefault(content, len(self._numbers))
        return lambda: self._pool.view(torch.int64).numpy().__setitem__(block_ids, number)

    def _check(self, block_id: int, content: Content, use: str) -> Callable[[], None]:
        number = self._numbers.setdefault(content, len(self._numbers))

        def work() -> None:
            held = int(self._pool.view(torch.int64)[block_id, 0])
            if held != number:
                self.mistakes.append(f"{use}: block {block_id} holds {held}, not {content}")

        return work


class StreamEngine(StreamCopyEngine):
    device: RequestsDevice

    def submit(self, copy: Copy) -> CopyJob:
        job = super().submit(copy)
        self.device.note(copy, job)
        return job

    def progress(self) -> None:
        """Nothing: streams run when somebody asks them."""
