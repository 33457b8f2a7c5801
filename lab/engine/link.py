"""The link of a running engine, changed for the time of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.executor.copies.copy_engine import Direction
from services.executor.copies.device.cpu_device import LinkModel


@contextmanager
def h2d_link(link: LinkModel) -> Iterator[None]:
    """Give the link into the pool another speed; the engine runs in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    links = connector._backend.engine.device.links
    before, links[Direction.H2D] = links[Direction.H2D], link
    try:
        yield
    finally:
        links[Direction.H2D] = before
