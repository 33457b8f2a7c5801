"""The link of a running engine, changed for the time of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.executor.copies.copy_engine import Direction
from services.executor.copies.cpu_copy_engine import LinkModel


@contextmanager
def h2d_link(link: LinkModel) -> Iterator[None]:
    """Give the link into the pool another speed; the engine runs in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    queue = connector._backend.engine._queues[Direction.H2D]
    before, queue._link = queue._link, link
    try:
        yield
    finally:
        queue._link = before
