"""Simulated ranks whose model and copies run on streams: the real device engine, late.

A block's content is a number in its page. What the model writes and reads is enqueued on the
compute stream, step after step, while nothing there may have run yet.
"""

import random
from collections.abc import Callable

import torch

from services.executor.kv.copy_engine import Direction
from services.executor.kv.cuda_copy_engine import CudaCopyEngine
from services.executor.kv.host_ring import HostRing
from services.executor.kv.metadata import StepFeedback, StepTransfers
from services.executor.kv.pages import GroupPages
from services.executor.kv.transfer_runner import TransferRunner
from tests.fake_streams import FakeDevice
from tests.unit.executor.kv.simulated_ranks import BLOCK_SIZE, Content, SimulatedRank, Slice

PAGE_BYTES = 8  # one number
BLOCKS_PER_CHUNK = 2


class StreamRank(SimulatedRank):
    """A rank as the executor runs it on a device."""

    def __init__(self, num_groups: int, rng: random.Random, *, form: str = "pinned") -> None:
        super().__init__(num_groups, rng)
        self.device = FakeDevice(rng.randrange(1 << 30))
        self.mistakes: list[str] = []
        self._numbers: dict[Content, int] = {None: 0}
        self._pool = torch.zeros((200, PAGE_BYTES), dtype=torch.uint8)
        host = torch.zeros((500, PAGE_BYTES), dtype=torch.uint8)
        rings = {}
        if form == "ring":
            rings = {
                d: HostRing([PAGE_BYTES], rows_per_buffer=BLOCKS_PER_CHUNK, num_buffers=2)
                for d in Direction
            }
        pages = [GroupPages(pool=(self._pool,), host=(host,)) for _ in range(num_groups)]
        self.engine = StreamEngine(pages, self.device, rings=rings)
        self.runner = TransferRunner(self.engine, num_groups)
        self.runner.fill = lambda ids, nan: self._poison(ids) if nan else None

    @property
    def faults(self) -> list[str]:
        return self.mistakes + self.device.races

    def close(self) -> None:
        self.engine.close()
        self.device.finish()

    def run_step(self, transfers: StepTransfers, batch: list[Slice]) -> StepFeedback:
        for request_id, group in transfers.dropped_tables:
            if group is None:  # it has ended: copies of its blocks may go on, and are of no use
                for row in self.rows.get(request_id, []):
                    self.device.forget_reads(self._pool, row)
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


class StreamEngine(CudaCopyEngine):
    def progress(self) -> None:
        """Nothing: streams run when somebody asks them."""
