"""Host memory is near the device: found in the bus's directory, and asked of the kernel."""

import ctypes
import errno
import platform
from pathlib import Path

import pytest
import torch

from services.executor.copies.host import host_memory
from services.executor.copies.host.host_memory import HostMemory, allocate_rows
from services.executor.copies.host.memory_node import PREFERRED, node_at, node_of, prefer_node

pytestmark = pytest.mark.filterwarnings("default")

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
OF_ADDRESS = 2  # MPOL_F_ADDR


def policy_at(address: int) -> int:
    mode = ctypes.c_int(-1)
    libc = ctypes.CDLL(None, use_errno=True)
    number = GET_MEMPOLICY[platform.machine()]
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.byref(mode),
        None,
        ctypes.c_ulong(0),
        ctypes.c_void_p(address),
        ctypes.c_ulong(OF_ADDRESS),
    )
    assert not failed, errno.errorcode[ctypes.get_errno()]
    return mode.value


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None)])
def test_a_devices_node_is_what_the_bus_says(tmp_path: Path, text: str, node: int | None) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text(text)

    assert node_at("0000:3b:00.0", devices=tmp_path) == node
    assert node_at("0000:ff:00.0", devices=tmp_path) is None
    assert node_of(torch.device("cpu")) is None


def test_rows_come_from_the_node_that_is_asked_for() -> None:
    plain = allocate_rows(4, 1 << 16)
    if prefer_node(plain.data_ptr(), plain.numel(), 0) in (errno.EPERM, errno.ENOSYS):
        pytest.skip("this container lets nobody choose")

    (near,) = HostMemory([1 << 16], 4, node=0).slabs

    assert policy_at(near.data_ptr()) == PREFERRED
    assert policy_at(near.data_ptr() + near.numel() - 1) == PREFERRED


@pytest.mark.logs("host_memory_on_any_node")
def test_memory_that_cannot_be_near_is_used_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "prefer_node", lambda *_: errno.EPERM)

    rows = allocate_rows(4, 1 << 12, 1)

    assert int(rows.sum()) == 0


def test_a_node_that_no_machine_has_is_an_error() -> None:
    rows = allocate_rows(1, 1 << 12)

    assert prefer_node(rows.data_ptr(), rows.numel(), 1 << 20)
