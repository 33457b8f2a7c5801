"""Descriptors of copies, and the driver's call for many of them, with a driver in Python."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from services.executor.copies.device import cuda_device
from services.executor.copies.device.batch_copy import (
    ANY_ORDER,
    STREAM_ORDER,
    Attributes,
    BatchFunction,
    descriptors,
    in_batches,
    one_by_one,
)
from services.executor.copies.device.cuda_device import CudaDevice, CudaStream, EventPool
from services.executor.copies.streams import CopyBatch, Layers, Part

ROW_BYTES, REFUSED = 64, 801


def rows_of(start: int) -> torch.Tensor:
    return torch.arange(start, start + 32, dtype=torch.uint8)[:, None].repeat(1, ROW_BYTES)


def batch_of(
    layers: list[tuple[torch.Tensor, torch.Tensor]], rows: list[int], to: list[int], **more: Any
) -> CopyBatch:
    """Return copies of rows of each layer's first matrix to rows of its second."""
    sources, targets = zip(*layers, strict=True)
    return CopyBatch(Layers(sources, targets), indices(rows), indices(to), **more)


def indices(rows: Any) -> Any:
    return np.array(rows, dtype=np.int64)


@pytest.mark.parametrize(
    ("rows", "to", "rows_per_range", "pinned", "lengths"),
    [
        ([3, 4, 5, 9], [0, 1, 2, 3], 0, "rows", [3, 1]),
        ([3, 4, 5], [7, 6, 5], 0, "rows", [1, 1, 1]),  # backwards is no run
        ([3, 4, 5, 6], [0, 1, 3, 4], 0, "rows", [2, 2]),
        ([6, 7, 8, 9], [0, 1, 2, 3], 8, "rows", [2, 2]),  # slot 8 was pinned with another range
        ([0, 1, 2], [7, 8, 9], 8, "to", [1, 2]),
        ([0, 1, 2], [7, 8, 9], 8, "rows", [3]),  # the pool is one range
        ([4], [4], 4, "rows", [1]),
        ([], [], 4, "rows", []),
    ],
)
def test_rows_that_follow_each_other_on_both_sides_are_one_copy(
    rows: list[int], to: list[int], rows_per_range: int, pinned: str, lengths: list[int]
) -> None:
    source, target = rows_of(0), rows_of(100)

    pinned_rows = indices(rows if pinned == "rows" else to)
    batch = batch_of([(source, target)], rows, to, pinned_rows=pinned_rows)
    found = descriptors(batch, rows_per_range=rows_per_range)
    sources, targets, sizes = found.of(Part(batch, 0, len(rows)))

    assert (sizes // ROW_BYTES).tolist() == lengths
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    assert ((sources - source.data_ptr()) // ROW_BYTES).tolist() == [rows[n] for n in starts]
    assert ((targets - target.data_ptr()) // ROW_BYTES).tolist() == [to[n] for n in starts]


def test_parts_of_a_batch_are_what_it_is_in_pieces_of_its_own() -> None:
    rng = np.random.default_rng(5)
    for rows_per_part in (1, 3, 4, 20):
        rows, to = np.sort(rng.choice(32, 17, replace=False)), np.arange(17)
        layers = [(rows_of(0), rows_of(100)), (rows_of(50), rows_of(150))]
        batch = CopyBatch(Layers(*zip(*layers, strict=True)), rows, to, rows_per_part, rows)
        found = descriptors(batch, rows_per_range=8)
        for start in range(0, 17, rows_per_part):
            for end in {*range(start + rows_per_part, 17, rows_per_part), 17}:
                part = Part(batch, start, end)
                moved = {
                    (source + n, target + n)
                    for source, target, size in zip(*map(list, found.of(part)), strict=True)
                    for n in range(0, int(size), ROW_BYTES)
                }
                assert moved == {
                    (s.data_ptr() + int(a) * ROW_BYTES, t.data_ptr() + int(b) * ROW_BYTES)
                    for s, t in layers
                    for a, b in zip(rows[start:end], to[start:end], strict=True)
                }


class Driver:
    """Copies at once, between addresses of the host."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []  # copies, order, stream
        self.error = 0
        self.function = BatchFunction(self._batch)  # kept: the address dies with it

    def _batch(self, targets: int, sources: int, sizes: int, count: int, *more: int) -> int:
        attributes, first, num_attributes, fault, stream = more
        order = Attributes.from_address(attributes).source_order
        assert (ctypes.c_size_t.from_address(first).value, num_attributes) == (0, 1)
        self.calls.append((count, order, stream))
        if self.error:
            ctypes.c_size_t.from_address(fault).value = count - 1
            return self.error
        numbers = (ctypes.c_size_t * count).from_address
        for target, source, size in zip(
            numbers(targets), numbers(sources), numbers(sizes), strict=True
        ):
            ctypes.memmove(target, source, size)
        return 0

    def cuMemcpyAsync(self, target: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        ctypes.memmove(target.value, source.value, size.value)
        self.calls.append((1, STREAM_ORDER, stream.value))
        return self.error


def never(error: Exception) -> None:
    raise AssertionError(error)


def test_a_batch_is_one_call_on_the_streams_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, source, targets = Driver(), rows_of(0), [rows_of(100), rows_of(200)]
    monkeypatch.setattr(cuda_device, "driver_batch_copy", lambda: in_batches(driver.function))
    stream: Any = type("Handle", (), {"cuda_stream": 77})()
    batch = batch_of([(source, target) for target in targets], [3, 4, 9], [0, 1, 5])
    device = CudaDevice(torch.device("cpu"))
    device.copy(
        CudaStream(stream, EventPool()), Part(batch, 0, 3), source_is_stable=True, failed=never
    )

    assert driver.calls == [(4, ANY_ORDER, 77)]  # two runs in each of two layers
    for target, start in zip(targets, (100, 200), strict=True):
        assert target[:6, 0].tolist() == [3, 4, start + 2, start + 3, start + 4, 9]
        assert (target[5] == 9).all()

    prepared = batch.prepared
    device.copy(
        CudaStream(stream, EventPool()), Part(batch, 0, 3), source_is_stable=True, failed=never
    )
    assert batch.prepared is prepared


def test_a_batch_that_the_driver_refuses_fails_by_its_number() -> None:
    driver = Driver()
    driver.error = REFUSED
    one = indices([[1], [1], [1]])

    with pytest.raises(RuntimeError, match="error 801 at copy 0"):
        in_batches(driver.function)(one, stream=5, order=STREAM_ORDER)


def test_a_driver_without_batches_copies_one_by_one() -> None:
    driver, source, target = Driver(), rows_of(0), rows_of(100)
    batch = batch_of([(source, target)], [3, 9], [0, 1])
    numbers = descriptors(batch).of(Part(batch, 0, 2))

    one_by_one(driver)(numbers, stream=5, order=ANY_ORDER)

    assert target[:3, 0].tolist() == [3, 9, 102]
    driver.error = REFUSED
    with pytest.raises(RuntimeError, match="801"):
        one_by_one(driver)(numbers, stream=5, order=ANY_ORDER)


class CountedEvent:
    """Stands for `torch.cuda.Event`."""

    num_made = 0

    def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
        CountedEvent.num_made += 1
        assert blocking
        self.enable_timing, self.num_records = enable_timing, 0

    def record(self, stream: Any) -> None:
        self.num_records += 1


def test_events_that_nobody_holds_are_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", CountedEvent)
    monkeypatch.setattr(CountedEvent, "num_made", 0)
    handle: Any = object()
    stream = CudaStream(handle, EventPool())

    held: list[Any] = [stream.record(timing=True) for _ in range(3)]
    for _ in range(100):
        stream.record()
        stream.record(timing=True)

    assert CountedEvent.num_made == 3 + 2
    assert len({id(event.event) for event in held}) == 3
    assert all(event.event.num_records == 1 for event in held)
