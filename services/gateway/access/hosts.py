"""Under which names a gateway may be called. Pure.

A page in a browser can make its own name lead to this machine (DNS rebinding) and then call what
listens here as if it were the page's server; but the browser says in `Host` which name it called.
"""

import re
from collections.abc import Iterable
from ipaddress import ip_address

ANY = "*"
HOST_PATTERN = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\]")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:\d*)?")


def is_loopback(name: str) -> bool:
    """Say whether a name or address of a host leads nowhere but to this machine."""
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def is_unownable(name: str) -> bool:
    """Say whether no page from the internet can have `name` as its own, so that it is safe from
    rebinding: an address, which no DNS server answers for, or a name without a dot, which only
    this network's resolver knows.
    """
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return "." not in name
    return True


class Hosts:
    """Names that a `Host` header may have: those that no page can own, this machine's, and those
    given.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """`*.example` is each name under it, `*` any."""
        self._names = frozenset(name.lower() for name in names if name)

    def admit(self, host: str) -> bool:
        """Say whether a `Host`, with or without a port, may be called; an empty one may."""
        if not host or ANY in self._names:
            return True
        parts = _HOST.fullmatch(host.lower())
        if parts is None:
            return False
        name = parts[1].removesuffix(".")
        if is_unownable(name) or is_loopback(name):
            return True
        above = {f"*{name[place:]}" for place, char in enumerate(name) if char == "."}
        return name in self._names or not above.isdisjoint(self._names)


ANY_HOST = Hosts([ANY])
