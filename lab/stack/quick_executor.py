"""`python -m lab.stack.quick_executor`: the executor, started in a third of the time.

vLLM is imported by three processes of an executor, one after the other, and that is most of a
start. Here it is imported once, before there is any thread; the engine's processes are forked from
a process that does nothing else.
"""

import os
import socket
from importlib import import_module
from multiprocessing import connection, context, forkserver, resource_tracker
from typing import Any

from setproctitle import getproctitle

from services.executor.app import main

IMPORTED = ("services.executor.plugin.cpu_worker", "services.executor.engine.engine")
STARTS_PROCESSES = (  # their `get_mp_context`
    "vllm.utils.system_utils",
    "vllm.v1.engine.coordinator",
    "vllm.v1.engine.utils",
    "vllm.v1.executor.multiproc_executor",
)


class Process(context.ForkServerProcess):
    """A process with its parent's environment, as one that is spawned has it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._environment)
        super().run()


class Forking(context.ForkServerContext):
    """Forks from here, as things are when `begin` is called."""

    Process = Process

    def begin(self) -> None:
        """Fork the process that will fork all others, also those that these ask for."""
        server = forkserver._forkserver
        resource_tracker.ensure_running()
        address = connection.arbitrary_address("AF_UNIX")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        alive, server._forkserver_alive_fd = os.pipe()
        server._forkserver_address = address
        server.ensure_running = _nothing
        if not os.fork():
            os.close(server._forkserver_alive_fd)
            try:
                forkserver.main(listener.fileno(), alive, None)
            finally:  # the last that could ask is gone
                os._exit(0)
        os.close(alive)
        listener.close()


def _nothing() -> None: ...


def prepare() -> None:
    """Import everything, and have the engine's processes forked."""
    for name in IMPORTED:
        import_module(name)
    getproctitle()  # it looks where the title is, which a changed environment hides
    forking = Forking()
    for name in STARTS_PROCESSES:
        import_module(name).get_mp_context = lambda: forking
    forking.begin()


if __name__ == "__main__":
    prepare()
    main()
