"""How the demo shows an engine: in a terminal one picture, elsewhere nothing."""

import io

from rich.console import Console

from cli.client.engine_watch import EngineState
from demo.readers import live_view
from evenflow.executor.v1 import executor_pb2 as pb

ERASED = "\x1b[2K"  # how a terminal is told to clear a line
STATES = [
    EngineState(update=pb.WatchRequestsResponse(num_steps=number, num_pool_blocks=63))
    for number in (1, 2)
]


def shown(*, is_terminal: bool) -> str:
    out = io.StringIO()
    with live_view(Console(file=out, force_terminal=is_terminal, width=80)) as show:
        for state in STATES:
            show(state)
    return out.getvalue()


def test_in_a_terminal_one_picture_is_redrawn_and_taken_away() -> None:
    drawn = shown(is_terminal=True)

    assert "of 63 blocks used" in drawn
    # Nothing of the picture stands behind what erases it last.
    assert "blocks" not in drawn.rpartition(ERASED)[2]
    assert drawn.count(ERASED) > len(STATES)


def test_elsewhere_nothing_is_printed() -> None:
    assert shown(is_terminal=False) == ""
