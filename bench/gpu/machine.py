"""What the cells measure: a GPU, or streams in memory that run late.

Needs torch and nothing of vLLM. In memory time is the streams' own: copies and layers take a set
time and everything else none, so that figures there say that a cell works, and no more.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lab.fake_streams import FakeDevice
from services.executor.copies.device.cuda_device import CudaDevice, CudaRegistrar
from services.executor.copies.host.host_memory import Registrar
from services.executor.copies.streams import Device

POISON = -1  # the tag of a block that holds nothing
LATE_LAYER_S, LATE_BYTES_PER_S = 1e-4, 1e9
GEMM_SIZE = 4096
SMALL_BYTES = 4096


class Machine(Protocol):
    """A device, and a model on its compute stream. Matrices are `[rows, row_bytes]` uint8."""

    name: str
    device: torch.device  # of the pool
    streams: Device
    registrar: Registrar | None

    def copies(self, rows_per_range: int) -> Device:
        """Return the device for an engine whose slots are pinned so many at a time; 0: all."""

    def layer(self) -> None:
        """Run a layer's arithmetic."""

    def put(self, rows: torch.Tensor, indices: Sequence[int], tags: Sequence[int]) -> None:
        """Fill rows with their tags."""

    def check(self, rows: torch.Tensor, indices: Sequence[int], tags: Sequence[int]) -> None:
        """Count the rows that are not full of their tags."""

    def num_wrong(self) -> int:
        """Return how many rows were wrong, when everything has run."""

    def finish(self) -> None:
        """Wait until everything has run."""

    def plain_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all bytes at once on the compute stream."""

    def small_copy(self) -> None:
        """Bring a step's tokens to the host, on the compute stream."""

    def capture(self, beside: Callable[[], None] | None = None) -> str:
        """Capture a CUDA graph while another thread does something; return what went wrong."""

    def pinned(self, num_bytes: int) -> torch.Tensor: ...


class CudaMachine:
    def __init__(self, *, layer_s: float = 3e-4) -> None:
        """`layer_s`: what a layer's arithmetic takes, about."""
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)
        self.streams: Device = CudaDevice(self.device)
        self.registrar: Registrar | None = CudaRegistrar(self.device)
        # Graphs and copies want a stream that is not the legacy one.
        torch.cuda.set_stream(torch.cuda.Stream(self.device))
        self._num_wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        self._factor = torch.randn((GEMM_SIZE, GEMM_SIZE), dtype=torch.bfloat16, device=self.device)
        self._product = torch.empty_like(self._factor)
        self._tokens = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=self.device)
        self._tokens_on_host = self.pinned(SMALL_BYTES)
        self._layer = self._captured_layer(layer_s)

    def copies(self, rows_per_range: int) -> Device:
        return CudaDevice(self.device, rows_per_range=rows_per_range)

    def _captured_layer(self, layer_s: float) -> torch.cuda.CUDAGraph:
        for _ in range(10):
            self._multiply(1)
        begin = self.streams.compute_stream().record(timing=True)
        self._multiply(10)
        end = self.streams.compute_stream().record(timing=True)
        end.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._multiply(max(1, round(10 * layer_s / begin.elapsed_s(end))))
        return graph

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.matmul(self._factor, self._factor, out=self._product)

    def layer(self) -> None:
        self._layer.replay()

    def put(self, rows: torch.Tensor, indices: Sequence[int], tags: Sequence[int]) -> None:
        words = rows.view(torch.int64)
        index, values = self._sent(indices), self._sent(tags)
        words.index_copy_(0, index, values[:, None].expand(-1, words.shape[1]))

    def check(self, rows: torch.Tensor, indices: Sequence[int], tags: Sequence[int]) -> None:
        held = rows.view(torch.int64).index_select(0, self._sent(indices))
        self._num_wrong += (held != self._sent(tags)[:, None]).any(1).sum()

    def _sent(self, numbers: Sequence[int]) -> torch.Tensor:
        pinned = torch.tensor(numbers, dtype=torch.int64).pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def num_wrong(self) -> int:
        return int(self._num_wrong.item())

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)

    def plain_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def small_copy(self) -> None:
        self._tokens_on_host.copy_(self._tokens, non_blocking=True)

    def capture(self, beside: Callable[[], None] | None = None) -> str:
        thread = threading.Thread(target=beside) if beside is not None else None
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="global"):
                if thread is not None:
                    thread.start()
                for _ in range(2_000):  # some 10 ms of launches
                    self._tokens.add_(1)
        except Exception as error:  # noqa: BLE001  # it is what is asked for
            return str(error).splitlines()[0]
        finally:
            if thread is not None:
                thread.join()
        return ""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class LateMachine:
    """Streams in memory (`lab.fake_streams`)."""

    def __init__(self, *, seed: int = 0) -> None:
        self.name = "streams in memory"
        self.device = torch.device("cpu")
        self._late = FakeDevice(seed, bytes_per_s=LATE_BYTES_PER_S)
        self.streams: Device = self._late
        self.registrar: Registrar | None = None
        self._num_wrong = 0

    def copies(self, rows_per_range: int) -> Device:
        return self._late

    def layer(self) -> None:
        self._late.compute_for(LATE_LAYER_S)

    def put(self, rows: torch.Tensor, indices: Sequence[int], tags: Sequence[int]) -> None:
        words = rows.view(torch.int64)
        index, values = torch.tensor(indices), torch.tensor(tags, dtype=torch.int64)

        def work() -> None:
            words[index] = values[:, None]

        self._late.write(rows, indices, work)

    def check(self, rows: torch.Tensor, indices: Sequence[int], tags: Sequence[int]) -> None:
        words = rows.view(torch.int64)
        index, values = torch.tensor(indices), torch.tensor(tags, dtype=torch.int64)

        def work() -> None:
            self._num_wrong += int((words[index] != values[:, None]).any(1).sum())

        self._late.read(rows, indices, work)

    def num_wrong(self) -> int:
        self.finish()
        return self._num_wrong

    def finish(self) -> None:
        self._late.finish()

    def plain_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._late.compute_for(source.numel() / LATE_BYTES_PER_S)

    def small_copy(self) -> None:
        self._late.compute_for(SMALL_BYTES / LATE_BYTES_PER_S)

    def capture(self, beside: Callable[[], None] | None = None) -> str:
        if beside is not None:
            beside()
        return ""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


def make_machine(device: str) -> Machine:
    """Return "cuda" or "cpu"."""
    return CudaMachine() if device == "cuda" else LateMachine()


def elapsed_s(machine: Machine, work: Callable[[], None]) -> float:
    """Return what the compute stream takes for what `work` enqueues; waits for it."""
    begin = machine.streams.compute_stream().record(timing=True)
    work()
    end = machine.streams.compute_stream().record(timing=True)
    end.synchronize()
    return begin.elapsed_s(end)
