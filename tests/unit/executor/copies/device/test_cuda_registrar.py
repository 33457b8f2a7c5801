"""Memory is pinned in a mode in which a capture in another thread forbids nothing."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.executor.copies.device import cuda_device
from services.executor.copies.device.cuda_device import RELAXED, CudaDevice, CudaRegistrar
from services.executor.copies.host.host_memory import HostMemory, PinningError

GLOBAL, OUT_OF_MEMORY, INVALID_CONTEXT = 0, 2, 201
DEVICE = torch.device("cuda", 0)


class Driver(threading.local):
    """Knows the calling thread's mode, and in which one memory was pinned and unpinned.

    As of a new thread, nothing has given it a context: torch takes the first device for set.
    """

    error = 0  # of pinning

    def __init__(self, calls: list[tuple[str, int, int]]) -> None:
        self.mode, self.context = GLOBAL, 0
        self.calls = calls  # of all threads: what, where, in which mode

    def cuCtxGetCurrent(self, reference: Any) -> int:  # noqa: N802
        reference._obj.value = self.context
        return 0

    def cuDevicePrimaryCtxRetain(self, reference: Any, device: Any) -> int:  # noqa: N802
        reference._obj.value = 0x1000 + device.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.context = context.value
        return 0

    def cuThreadExchangeStreamCaptureMode(self, reference: Any) -> int:  # noqa: N802
        if not self.context:
            return INVALID_CONTEXT
        mode = reference._obj
        mode.value, self.mode = self.mode, mode.value
        return 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("register", address, self.mode))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unregister", address, self.mode))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver([])
    monkeypatch.setattr(cuda_device, "cuda_driver", lambda: driver)
    monkeypatch.setattr(
        torch, "cuda", SimpleNamespace(set_device=lambda device: None, cudart=lambda: driver)
    )
    return driver


def test_memory_is_pinned_and_unpinned_whatever_another_thread_captures(driver: Driver) -> None:
    registrar = CudaRegistrar(DEVICE)

    registrar.register(4096, 8192)
    registrar.unregister(4096)

    assert driver.calls == [("register", 4096, RELAXED), ("unregister", 4096, RELAXED)]
    assert driver.mode == GLOBAL


def test_a_refusal_is_an_error_and_the_thread_is_as_it_was(driver: Driver) -> None:
    driver.error = OUT_OF_MEMORY

    with pytest.raises(PinningError, match="8192 bytes: 2"):
        CudaRegistrar(DEVICE).register(4096, 8192)

    assert driver.mode == GLOBAL


def test_a_thread_that_pins_in_the_background_has_the_devices_context(driver: Driver) -> None:
    memory = HostMemory([1 << 16], 3 * 256, registrar=CudaRegistrar(DEVICE))
    memory.start_pinning()
    memory.wait_until_pinned()

    assert [mode for _, _, mode in driver.calls] == [RELAXED] * 3
    memory.close()


def test_a_thread_that_copies_has_it_too(driver: Driver) -> None:
    found: list[int] = []

    def attach() -> None:
        CudaDevice(DEVICE).attach()
        found.append(driver.context)

    thread = threading.Thread(target=attach)
    thread.start()
    thread.join()

    assert found == [0x1000]
