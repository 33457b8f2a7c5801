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

from services.executor.copies.streams import CopyBatch, Part

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

    def __call__(self, numbers: Numbers, *, stream: int, order: int) -> None:
        """`numbers`: [3, copies], the rows of sources, targets and sizes in bytes."""


@lru_cache(maxsize=1)
def cuda_driver() -> Any:
    """Return the functions of this machine's driver. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=1)
def driver_batch_copy() -> BatchCopy:
    """Return what this machine's driver has. Raises OSError where there is no driver."""
    address = ctypes.c_void_p()
    status = ctypes.c_int()
    error = cuda_driver().cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync",
        ctypes.byref(address),
        ctypes.c_int(BATCH_VERSION),
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    if error or not address.value:
        return one_by_one(cuda_driver())
    return in_batches(BatchFunction(address.value))


def in_batches(function: Any) -> BatchCopy:
    """Return copies by a `BatchFunction`."""
    attributes = {order: Attributes(source_order=order) for order in (STREAM_ORDER, ANY_ORDER)}
    first = ctypes.c_size_t(0)

    def copy(numbers: Numbers, *, stream: int, order: int) -> None:
        num_copies = numbers.shape[1]
        if not num_copies:
            return
        sources, row_bytes = numbers.ctypes.data, numbers.strides[0]
        fault = ctypes.c_size_t()
        error = function(
            sources + row_bytes,  # the targets
            sources,
            sources + 2 * row_bytes,  # the sizes
            num_copies,
            ctypes.addressof(attributes[order]),
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

    def copy(numbers: Numbers, *, stream: int, order: int) -> None:
        for source, target, size in zip(*numbers.tolist(), strict=True):
            error = driver.cuMemcpyAsync(
                ctypes.c_uint64(target),
                ctypes.c_uint64(source),
                ctypes.c_size_t(size),
                ctypes.c_void_p(stream),
            )
            if error:
                raise RuntimeError(f"cuMemcpyAsync: error {error}")

    return copy


@dataclass(slots=True, eq=False)
class Descriptors:
    """A batch as the driver takes it: for each layer one copy per run of rows."""

    starts: Numbers  # of the runs, among the batch's rows
    numbers: Numbers  # [3, layers * runs]: where from, where to, how many bytes

    def of(self, part: Part) -> Numbers:
        """Return the numbers of a part."""
        if part.is_whole:
            return self.numbers
        some = slice(*np.searchsorted(self.starts, (part.start, part.end)))
        return self.numbers.reshape(3, -1, len(self.starts))[:, :, some].reshape(3, -1)


def descriptors(batch: CopyBatch, *, rows_per_range: int = 0) -> Descriptors:
    """Return what the driver is told of a batch.

    A run follows on both sides, and crosses no multiple of `rows_per_range` (0: no bound) of pinned
    rows, for no copy may cross from one pinned range to another, nor from a part to the next. The
    matrices' rows are dense.
    """
    layers = batch.layers.numbers
    starts, lengths = runs(batch, rows_per_range)
    source_rows, target_rows = batch.source_rows[starts], batch.target_rows[starts]
    numbers = np.empty((3, len(layers), len(starts)), dtype=np.int64)
    sources, targets, sizes = numbers
    for layer, (row_bytes, source, target) in enumerate(layers):
        np.multiply(source_rows, row_bytes, out=sources[layer])
        np.multiply(target_rows, row_bytes, out=targets[layer])
        np.multiply(lengths, row_bytes, out=sizes[layer])
        sources[layer] += source
        targets[layer] += target
    return Descriptors(starts, numbers.reshape(3, -1))


def runs(batch: CopyBatch, rows_per_range: int) -> tuple[Numbers, Numbers]:
    """Return where runs of rows begin, and how long they are."""
    sources, targets = batch.source_rows, batch.target_rows
    begins = np.empty(len(sources), dtype=bool)
    begins[:1], breaks = True, begins[1:]
    np.not_equal(sources[1:] - sources[:-1], 1, out=breaks)
    breaks |= targets[1:] - targets[:-1] != 1
    if rows_per_range and batch.pinned_rows is not None:
        ranges = batch.pinned_rows // rows_per_range  # unlike remainders, many at once
        breaks |= ranges[1:] != ranges[:-1]
    if batch.rows_per_part:
        begins[:: batch.rows_per_part] = True
    (starts,) = begins.nonzero()
    ends = np.empty_like(starts)
    ends[:-1], ends[-1:] = starts[1:], len(begins)
    return starts, ends - starts
