"""Ports for servers that tests start: each is given out once, whichever process asks."""

import fcntl
import os
import tempfile
from pathlib import Path

from cli.local.preflight import is_free

# Below what Linux gives to outgoing connections, so that none of those sits on a port by the time
# its server binds it.
PORTS = range(18_000, 32_000)


def free_port() -> int:
    """Return a TCP port of the loopback address on which no process listens, or soon will.

    Test processes that run side by side count through `PORTS` together.
    """
    path = Path(tempfile.gettempdir()) / f"evenflow-test-ports-{os.getuid()}"
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        last = int(file.read() or PORTS[0])
        for step in range(1, len(PORTS) + 1):
            port = PORTS[(last - PORTS.start + step) % len(PORTS)]
            if is_free(port):
                file.truncate(0)
                file.write(str(port))
                return port
    raise OSError(f"no free port in {PORTS}")
