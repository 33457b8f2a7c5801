"""Which node of a machine's memory a device is near to, and pages that are to be there."""

import ctypes
import platform
from pathlib import Path

import torch

PCI_DEVICES = Path("/sys/bus/pci/devices")
MBIND = {"x86_64": 237, "aarch64": 235}  # the system call's number
PREFERRED = 1  # MPOL_PREFERRED: elsewhere when the node is full
MAX_NODES = 1024
ENOSYS = 38


def node_of(device: torch.device) -> int | None:
    """Return the node of a device; None if it has none, or the machine has one only."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    try:
        numbers = [getattr(found, f"pci_{name}_id") for name in ("domain", "bus", "device")]
    except AttributeError:  # a torch that does not tell
        return None
    return node_at("{:04x}:{:02x}:{:02x}.0".format(*numbers))


def node_at(address: str, *, devices: Path = PCI_DEVICES) -> int | None:
    """Return the node of what is at an address of the PCI bus, as Linux knows it."""
    try:
        node = int((devices / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, num_bytes: int, node: int) -> int:
    """Have pages that nothing has touched come from a node; return the error's number, or 0.

    The range begins on an OS page. A container may refuse it.
    """
    number = MBIND.get(platform.machine())
    if number is None or not 0 <= node < MAX_NODES:
        return ENOSYS
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    nodes = (ctypes.c_ulong * (MAX_NODES // bits))()
    nodes[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(PREFERRED),
        nodes,
        ctypes.c_ulong(MAX_NODES),
        ctypes.c_uint(0),
    )
    return ctypes.get_errno() if failed else 0
