"""Streams, events, copies and pinning of CUDA.

Copies go through vLLM's `swap_blocks_batch`: one driver call for a batch of scattered pages
(cuMemcpyBatchAsync from CUDA 12.8 on, a loop of cudaMemcpyAsync before). The device's copy engines
carry them out, so that they take no multiprocessor from the model. Gather kernels pay off below
about 28 KiB per piece, says vLLM; pages here are larger: 32 tokens of 8 heads of 128 in two bytes
are 128 KiB.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from vllm import _custom_ops as ops

from services.executor.copies.host_memory import PinningError
from services.executor.copies.streams import Event, RowCopy, Stream


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_s(self, end: Event) -> float:
        assert isinstance(end, CudaEvent)
        return float(self.event.elapsed_time(end.event)) * 1e-3  # CUDA counts milliseconds


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def record(self, *, timing: bool = False) -> CudaEvent:
        event = torch.cuda.Event(enable_timing=timing)
        event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CudaDevice:
    """`Device` on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def attach(self) -> None:
        torch.cuda.set_device(self._device)

    def compute_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def new_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device))

    def copy(self, stream: Stream, copies: Sequence[RowCopy], *, source_is_stable: bool) -> None:
        assert isinstance(stream, CudaStream)
        sources = np.concatenate([addresses(c.source, c.source_rows) for c in copies])
        targets = np.concatenate([addresses(c.target, c.target_rows) for c in copies])
        sizes = np.repeat(
            [c.source.shape[1] for c in copies], [len(c.source_rows) for c in copies]
        ).astype(np.int64)
        with torch.cuda.stream(stream.stream):
            ops.swap_blocks_batch(
                torch.from_numpy(sources),
                torch.from_numpy(targets),
                torch.from_numpy(sizes),
                is_src_access_order_any=source_is_stable,
            )

    def copy_on_host(self, copy: RowCopy) -> None:
        copy.target.numpy()[copy.target_rows] = copy.source.numpy()[copy.source_rows]

    def fill(self, rows: torch.Tensor, indices: npt.NDArray[np.int64], byte: int) -> None:
        rows.index_fill_(0, torch.from_numpy(indices).to(rows.device), byte)


class CudaRegistrar:
    """Pins host memory for one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> None:
        torch.cuda.set_device(self._device)
        result = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
        if int(result) != 0:
            raise PinningError(f"cudaHostRegister of {num_bytes} bytes: {result}")

    def unregister(self, address: int) -> None:
        torch.cuda.set_device(self._device)
        torch.cuda.cudart().cudaHostUnregister(address)


def addresses(rows: torch.Tensor, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where rows begin in memory."""
    row_bytes = rows.stride(0) * rows.element_size()
    found: npt.NDArray[np.int64] = indices * row_bytes + rows.data_ptr()
    return found
