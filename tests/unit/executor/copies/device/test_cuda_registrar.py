"""Memory is pinned in a mode in which a capture in another thread forbids nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.executor.copies.device import cuda_device
from services.executor.copies.device.cuda_device import RELAXED, CudaRegistrar
from services.executor.copies.host.host_memory import PinningError

GLOBAL, OUT_OF_MEMORY = 0, 2


class Driver:
    """Knows the calling thread's mode, and in which one memory was pinned and unpinned."""

    def __init__(self) -> None:
        self.mode, self.error = GLOBAL, 0
        self.calls: list[tuple[str, int, int]] = []  # what, where, in which mode

    def cuThreadExchangeStreamCaptureMode(self, reference: Any) -> int:  # noqa: N802
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
    driver = Driver()
    monkeypatch.setattr(cuda_device, "cuda_driver", lambda: driver)
    monkeypatch.setattr(
        torch, "cuda", SimpleNamespace(set_device=lambda device: None, cudart=lambda: driver)
    )
    return driver


def test_memory_is_pinned_and_unpinned_whatever_another_thread_captures(driver: Driver) -> None:
    registrar = CudaRegistrar(torch.device("cpu"))

    registrar.register(4096, 8192)
    registrar.unregister(4096)

    assert driver.calls == [("register", 4096, RELAXED), ("unregister", 4096, RELAXED)]
    assert driver.mode == GLOBAL


def test_a_refusal_is_an_error_and_the_thread_is_as_it_was(driver: Driver) -> None:
    driver.error = OUT_OF_MEMORY

    with pytest.raises(PinningError, match="8192 bytes: 2"):
        CudaRegistrar(torch.device("cpu")).register(4096, 8192)

    assert driver.mode == GLOBAL
