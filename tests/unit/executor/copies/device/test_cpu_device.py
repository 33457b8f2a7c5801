"""A CPU's streams: their clock, their order, and their end."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from services.executor.copies.copy_engine import Direction
from services.executor.copies.device.cpu_device import CpuDevice, LinkModel, chunks_of
from services.executor.copies.streams import CopyBatch, Layers, Part, Stream
from tests.link_gate import LinkGate

NUM_ROWS, ROW_BYTES = 10, 1 << 10
CLOSE_S = 60.0


class Rig:
    """A link that takes 1 ms per row, and as much again per chunk of four rows."""

    def __init__(self) -> None:
        link = LinkModel(bytes_per_s=1e3 * ROW_BYTES, latency_s=1e-3)
        self.device = CpuDevice(h2d=link, d2h=link)
        self.streams = {d: self.device.new_stream(d) for d in Direction}
        self.rows = [torch.full((NUM_ROWS, ROW_BYTES), n, dtype=torch.uint8) for n in range(3)]
        self.errors: list[Exception] = []

    def copy(self, direction: Direction, source: int, target: int) -> None:
        every = np.arange(NUM_ROWS)
        layers = Layers([self.rows[source]], [self.rows[target]])
        part = Part(CopyBatch(layers, every, every, rows_per_part=4), 0, NUM_ROWS)
        stream = self.streams[direction]
        self.device.copy(stream, part, source_is_stable=False, failed=self.errors.append)

    def close(self) -> list[bool]:
        return [stream.close(CLOSE_S) for stream in self.streams.values()]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def held(stream: Stream) -> bool:
    """Return whether what a stream was given has not all run."""
    return not stream.record().query()


def test_a_link_takes_its_time_for_every_chunk_however_late_its_thread_is(rig: Rig) -> None:
    stream = rig.streams[Direction.H2D]
    stream.wait(ready := rig.device.compute_stream().record())
    begin = stream.record(timing=True)
    rig.copy(Direction.H2D, 1, 0)
    rig.copy(Direction.H2D, 2, 0)
    end = stream.record(timing=True)
    rig.device.compute_stream().wait(end)

    assert ready.elapsed_s(begin) == 0.0
    assert begin.elapsed_s(end) == pytest.approx(2 * (NUM_ROWS + 3) * 1e-3)  # ten rows: 4, 4, 2
    assert (rig.rows[0] == 2).all()


def test_a_stream_goes_on_when_what_it_waits_for_on_another_has_passed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = LinkGate(monkeypatch)
    saves, loads = rig.streams[Direction.D2H], rig.streams[Direction.H2D]
    rig.copy(Direction.D2H, 2, 1)
    loads.wait(saves.record())
    rig.copy(Direction.H2D, 1, 0)

    gate.await_chunk()
    assert held(saves)
    assert held(loads)
    gate.open()
    rig.device.compute_stream().wait(loads.record())

    assert (rig.rows[0] == 2).all()


def test_a_wait_of_the_layers_ends_after_its_bound(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compute = LinkGate(monkeypatch), rig.device.compute_stream()
    rig.copy(Direction.H2D, 1, 0)
    end = rig.streams[Direction.H2D].record()

    assert not compute.wait(end, 0.01)
    gate.open()
    assert compute.wait(end)


def test_a_stream_that_closes_moves_no_further_chunk_and_its_copies_fail(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = LinkGate(monkeypatch)
    rig.copy(Direction.H2D, 1, 0)
    rig.copy(Direction.H2D, 2, 0)
    end = rig.streams[Direction.H2D].record()
    gate.await_chunk()

    assert rig.close() == [True, True]  # their threads have ended

    assert end.query()
    assert len(rig.errors) == 2
    assert (rig.rows[0] == 0).all()
    assert rig.close() == [True, True]


@pytest.mark.parametrize(
    ("start", "end", "expected"), [(0, 10, [(0, 4), (4, 8), (8, 10)]), (4, 7, [(4, 7)]), (0, 0, [])]
)
def test_parts_are_cut_where_chunks_end(
    start: int, end: int, expected: list[tuple[int, int]]
) -> None:
    rows, every = torch.zeros((NUM_ROWS, 8), dtype=torch.uint8), np.arange(NUM_ROWS)
    part = Part(CopyBatch(Layers([rows], [rows]), every, every, rows_per_part=4), start, end)

    assert [(chunk.start, chunk.end) for chunk in chunks_of(part)] == expected
