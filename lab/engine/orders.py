"""What happens to a request of an engine that is stepped by hand, by its id."""

from collections.abc import Callable
from typing import Any

from services.placement.layer_placement import LayerPlacement

# Takes a layer-wise scheduler and a request's id, and holds from the next step on.
Order = Callable[[Any, str], None]


def place(scheduler: Any, request_id: str, placement: LayerPlacement) -> None:
    """Say where a request's layer groups belong, as a plan does."""
    scheduler.records[request_id].floor = placement


def pause(scheduler: Any, request_id: str) -> None:
    """Let a request keep its place and not run, as if its reader had stopped."""
    scheduler.hold({request_id: True})


def park(scheduler: Any, request_id: str) -> None:
    """Send a request to the queue, as a run policy does, and keep it there."""
    scheduler.engine.park(scheduler.records[request_id])
    pause(scheduler, request_id)


def resume(scheduler: Any, request_id: str) -> None:
    """Let a paused or parked request run again."""
    scheduler.hold({request_id: False})


def forget_free_blocks(scheduler: Any) -> None:
    """Let no request find what is still in free blocks, as if others had had them since."""
    scheduler.block_owner.blocks.forget_left()


def held(scheduler: Any) -> set[str]:
    """Return the requests that are paused or parked."""
    return {name for name, record in scheduler.records.items() if record.holds}
