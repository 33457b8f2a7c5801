"""One driver call for many copies: `cuMemcpyBatchAsync`, from CUDA 12.8 on.

Called by its address with the stream's handle, without torch's or vLLM's way there: the call lets
other threads of Python run meanwhile, and nothing but the driver is needed. Before 12.8 it is a
call of `cuMemcpyAsync` per copy.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from services.executor.copies.streams import Batch, Part

Numbers = npt.NDArray[np.int64]

STREAM_ORDER, ANY_ORDER = 1, 3  # CUmemcpySrcAccessOrder: when the source may be read
BATCH_VERSION = 12_080  # of CUDA


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes. Locations are hints for managed memory, of which there is none."""

    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


# CUresult(targets, sources, sizes, count, attributes, attribute starts, their count, fault, stream)
BatchFunction = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


class BatchCopy(Protocol):
    """Enqueues copies by address on a stream's handle. Raises RuntimeError if one is refused."""

    def __call__(
        self, sources: Numbers, targets: Numbers, sizes: Numbers, *, stream: int, order: int
    ) -> None: ...


@lru_cache(maxsize=1)
def driver_batch_copy() -> BatchCopy:
    """Return what this machine's driver has. Raises OSError where there is no driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_void_p()
    status = ctypes.c_int()
    error = driver.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync",
        ctypes.byref(address),
        ctypes.c_int(BATCH_VERSION),
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    if error or not address.value:
        return one_by_one(driver)
    return in_batches(BatchFunction(address.value))


def in_batches(function: Any) -> BatchCopy:
    """Return copies by a `BatchFunction`."""

    def copy(
        sources: Numbers, targets: Numbers, sizes: Numbers, *, stream: int, order: int
    ) -> None:
        if not len(sizes):
            return
        attributes, first, fault = (
            Attributes(source_order=order),
            ctypes.c_size_t(0),
            ctypes.c_size_t(),
        )
        error = function(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(fault),
            stream,
        )
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync: error {error} at copy {fault.value}")

    return copy


def one_by_one(driver: Any) -> BatchCopy:
    """Return copies by a driver without batches, which reads every source in the stream's order."""

    def copy(
        sources: Numbers, targets: Numbers, sizes: Numbers, *, stream: int, order: int
    ) -> None:
        for source, target, size in zip(
            sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
        ):
            error = driver.cuMemcpyAsync(
                ctypes.c_uint64(target),
                ctypes.c_uint64(source),
                ctypes.c_size_t(size),
                ctypes.c_void_p(stream),
            )
            if error:
                raise RuntimeError(f"cuMemcpyAsync: error {error}")

    return copy


@dataclass(frozen=True, slots=True)
class Descriptors:
    """A batch as the driver takes it: for each run of rows one copy per layer, run by run."""

    starts: Numbers  # of the runs, among the batch's rows
    sources: Numbers  # addresses
    targets: Numbers
    sizes: Numbers  # bytes

    def of(self, part: Part) -> tuple[Numbers, Numbers, Numbers]:
        """Return sources, targets and sizes of a part."""
        num_layers = len(part.batch.copies)
        begin, end = np.searchsorted(self.starts, (part.start, part.end)) * num_layers
        return self.sources[begin:end], self.targets[begin:end], self.sizes[begin:end]


def descriptors(batch: Batch, *, rows_per_range: int = 0) -> Descriptors:
    """Return what the driver is told of a batch, whose copies are of the same rows.

    A run follows on both sides, and crosses no multiple of `rows_per_range` (0: no bound), for no
    copy may cross from one pinned range to another, nor from a part to the next. The matrices' rows
    are dense.
    """
    first = batch.copies[0]
    assert all(
        copy.source_rows is first.source_rows and copy.target_rows is first.target_rows
        for copy in batch.copies
    )
    starts, lengths = runs(
        first.source_rows, first.target_rows, rows_per_range, batch.rows_per_part
    )
    source_rows, target_rows = first.source_rows[starts], first.target_rows[starts]
    sources, targets, sizes = np.empty((3, len(starts), len(batch.copies)), dtype=np.int64)
    for layer, copy in enumerate(batch.copies):
        row_bytes = copy.source.shape[1]
        sources[:, layer] = source_rows * row_bytes + copy.source.data_ptr()
        targets[:, layer] = target_rows * row_bytes + copy.target.data_ptr()
        sizes[:, layer] = lengths * row_bytes
    return Descriptors(starts, sources.ravel(), targets.ravel(), sizes.ravel())


def runs(
    sources: Numbers, targets: Numbers, rows_per_range: int, rows_per_part: int
) -> tuple[Numbers, Numbers]:
    """Return where runs of pairs begin, and how long they are."""
    num_rows = len(sources)
    begins = np.ones(num_rows, dtype=bool)
    begins[1:] = (sources[1:] - sources[:-1] != 1) | (targets[1:] - targets[:-1] != 1)
    if rows_per_range:
        begins |= (sources % rows_per_range == 0) | (targets % rows_per_range == 0)
    if rows_per_part:
        begins[::rows_per_part] = True
    starts = np.flatnonzero(begins)
    lengths = np.empty_like(starts)
    lengths[:-1] = starts[1:] - starts[:-1]
    lengths[-1:] = num_rows - starts[-1:]
    return starts, lengths
