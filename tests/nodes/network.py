"""A network of two nodes on one machine: its own, and a namespace."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

NAMESPACE, OUTER, INNER = "evenflow-node-1", "evenflow-0", "evenflow-1"
NETWORK = "10.231.77"
LEADER_HOST, FOLLOWER_HOST = f"{NETWORK}.1", f"{NETWORK}.2"
IP = shutil.which("ip") or ""
WITHIN = (IP, "netns", "exec", NAMESPACE)  # runs a command on the second node


def why_not() -> str:
    """Return why this machine cannot have such a network; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not IP:
        return "network namespaces need `ip`"
    try:
        with network():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"


@contextmanager
def network() -> Iterator[None]:
    """Have the namespace, and a link to it, while the block runs."""
    _remove()
    try:
        _ip("netns", "add", NAMESPACE)
        _ip("link", "add", OUTER, "type", "veth", "peer", "name", INNER, "netns", NAMESPACE)
        _ip("addr", "add", f"{LEADER_HOST}/24", "dev", OUTER)
        _ip("-n", NAMESPACE, "addr", "add", f"{FOLLOWER_HOST}/24", "dev", INNER)
        _ip("link", "set", OUTER, "up")
        for device in ("lo", INNER):
            _ip("-n", NAMESPACE, "link", "set", device, "up")
        yield
    finally:
        _remove()


def cut_link() -> None:
    """Have every packet between the nodes vanish: no connection is closed."""
    _ip("-n", NAMESPACE, "link", "set", INNER, "down")


def mend_link() -> None:
    _ip("-n", NAMESPACE, "link", "set", INNER, "up")


class Link:
    """The link to an executor on the second node, as `LinkProxy` is one to a process."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The network stays until its own end."""

    @contextmanager
    def silent(self) -> Iterator[None]:
        cut_link()
        try:
            yield
        finally:
            mend_link()


def _remove() -> None:
    for what in (("link", "del", OUTER), ("netns", "del", NAMESPACE)):
        with suppress(subprocess.CalledProcessError):
            _ip(*what)


def _ip(*arguments: str) -> None:
    subprocess.run([IP, *arguments], check=True, capture_output=True, text=True)
