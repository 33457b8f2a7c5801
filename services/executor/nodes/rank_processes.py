"""What a node's ranks need to find the others, and their end with the group."""

import multiprocessing
import socket
from contextlib import suppress

import psutil

from services.executor.settings import ExecutorSettings, set_rank_address


def announce_address(settings: ExecutorSettings) -> None:
    """Have this node's ranks be reached where it talks to the leader, unless told otherwise.

    Raises OSError if the leader's name does not resolve.
    """
    address = address_towards(settings.leader_address)
    set_rank_address(address, interface_of(address))


def address_towards(leader_address: str) -> str:
    """Return this host's address on the way to "host:port"; nothing is sent."""
    host, _, port = leader_address.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the network interface with an address of this host; empty if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return str(name)
    return ""


def free_rendezvous_port() -> int:
    """Return a TCP port that is free on every address of this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def kill_ranks() -> None:
    """Kill the processes that this one has started for its engine.

    A rank that waits for another node's hears nothing else. What clears up behind them lives on.
    """
    for child in multiprocessing.active_children():
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(child.pid)
            for process in [*root.children(recursive=True), root]:
                _kill(process)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        if "resource_tracker" not in " ".join(process.cmdline()):
            process.kill()
