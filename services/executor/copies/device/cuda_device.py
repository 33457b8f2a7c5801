"""Streams, events, copies and pinning of CUDA.

The device's copy engines carry batches of copies out, so that they take no multiprocessor from the
model. Gather kernels pay off below about 28 KiB per piece, says vLLM; pages here are larger: 32
tokens of 8 heads of 128 in two bytes are 128 KiB.
"""

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.executor.copies.copy_engine import Direction
from services.executor.copies.device.batch_copy import (
    ANY_ORDER,
    STREAM_ORDER,
    cuda_driver,
    descriptors,
    driver_batch_copy,
)
from services.executor.copies.host.host_memory import PinningError
from services.executor.copies.streams import Event, OnFailure, Part, Rows, Stream, ends_within

RELAXED = 2  # CUstreamCaptureMode: other threads' captures forbid the calling one nothing


class EventPool:
    """Events that nothing holds, to be recorded again: a stream that waits for an event waits for
    the recording that it saw. Whoever waits on the host sleeps and leaves the driver's lock alone.
    """

    def __init__(self) -> None:
        self._free: dict[bool, list[torch.cuda.Event]] = {False: [], True: []}  # by timing

    def take(self, *, timing: bool) -> torch.cuda.Event:
        try:
            return self._free[timing].pop()
        except IndexError:
            return torch.cuda.Event(enable_timing=timing, blocking=True)

    def give_back(self, event: torch.cuda.Event, *, timing: bool) -> None:
        self._free[timing].append(event)


class CudaEvent:
    """Goes back to the pool with its last reference."""

    def __init__(self, pool: EventPool, stream: torch.cuda.Stream, *, timing: bool) -> None:
        self._pool, self._timing = pool, timing
        self.event = pool.take(timing=timing)
        self.event.record(stream)

    def __del__(self) -> None:
        self._pool.give_back(self.event, timing=self._timing)

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_s(self, end: Event) -> float:
        assert isinstance(end, CudaEvent)
        return float(self.event.elapsed_time(end.event)) * 1e-3  # CUDA counts milliseconds


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream, events: EventPool) -> None:
        self.stream = stream
        self._events = events

    def record(self, *, timing: bool = False) -> CudaEvent:
        return CudaEvent(self._events, self.stream, timing=timing)

    def wait(self, event: Event, timeout_s: float = math.inf) -> bool:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)
        return True

    def close(self, timeout_s: float) -> bool:
        return ends_within(self, timeout_s)


class CudaDevice:
    """`Device` on one GPU."""

    max_chunks_ahead = 4

    def __init__(self, device: torch.device, *, rows_per_range: int = 0) -> None:
        """`rows_per_range`: slots of a range of host memory that is pinned as one; 0: all."""
        self._device = device
        self._rows_per_range = rows_per_range
        self._events = EventPool()

    def attach(self) -> None:
        make_current(self._device)

    def compute_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device), self._events)

    def new_stream(self, direction: Direction | None = None) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device), self._events)

    def copy(
        self, stream: Stream, part: Part, *, source_is_stable: bool, failed: OnFailure
    ) -> None:
        assert isinstance(stream, CudaStream)
        batch = part.batch
        if batch.prepared is None:
            batch.prepared = descriptors(batch, rows_per_range=self._rows_per_range)
        driver_batch_copy()(
            batch.prepared.of(part),
            stream=stream.stream.cuda_stream,
            order=ANY_ORDER if source_is_stable else STREAM_ORDER,
        )

    def fill(self, rows: torch.Tensor, indices: npt.NDArray[np.int64], byte: int) -> None:
        rows.index_fill_(0, torch.from_numpy(indices).to(rows.device), byte)

    def calculate(
        self, work: Callable[[], None], *, reads: Sequence[Rows], writes: Sequence[Rows]
    ) -> None:
        work()  # the calling thread's stream is the compute stream


def make_current(device: torch.device) -> None:
    """Make a device the calling thread's, for torch and for the driver.

    A new thread has the first device and not its context. torch calls nothing where the device is
    the thread's already; the driver refuses the calls of a thread that has no context.
    """
    torch.cuda.set_device(device)
    driver, context = cuda_driver(), ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(device.index))
        driver.cuCtxSetCurrent(context)


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Let the calling thread pin memory though another one may be capturing a graph.

    Without it the call is refused then, and the capture void.
    """
    mode = ctypes.c_uint(RELAXED)
    cuda_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # which is the old one now
    try:
        yield
    finally:
        cuda_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class CudaRegistrar:
    """Pins host memory for one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> None:
        make_current(self._device)
        with beside_captures():
            result = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
        if int(result) != 0:
            raise PinningError(f"cudaHostRegister of {num_bytes} bytes: {result}")

    def unregister(self, address: int) -> None:
        make_current(self._device)
        with beside_captures():
            torch.cuda.cudart().cudaHostUnregister(address)
