"""An engine's state for people: a screen that changes on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.client.engine_watch import EngineState, Row
from evenflow.executor.v1 import executor_pb2 as pb
from services.kit.rpc import name_of_request

BAR_WIDTH = 28
SECONDS_PER_LINE = 1.0  # off a terminal

STATES: dict["pb.RequestState.ValueType", tuple[str, str]] = {
    pb.REQUEST_STATE_QUEUED: ("queued", "dim"),
    pb.REQUEST_STATE_PREFILL: ("prefill", "cyan"),
    pb.REQUEST_STATE_DECODING: ("decoding", "green"),
    pb.REQUEST_STATE_PAUSED: ("paused", "yellow"),
    pb.REQUEST_STATE_PARKED: ("parked", "magenta"),
}
RUNNING = (pb.REQUEST_STATE_PREFILL, pb.REQUEST_STATE_DECODING)
ENDED = ("read out", "dim")
UNKNOWN = ("?", "red")


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What things are drawn with."""

    read: str
    deposited: str
    open: str
    resident: str
    offloaded: str
    restoring: str
    levels: str  # of a spark line, low to high


BLOCKS = Glyphs("█", "▒", "·", "█", "░", "▓", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#", "=", ".", "R", "o", "b", "_.-=^")


def glyphs_for(encoding: str | None) -> Glyphs:
    """Return blocks where the output can carry them."""
    try:
        "".join((*BLOCKS.levels, BLOCKS.deposited)).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


class Display(Protocol):
    """Shows states until it is closed."""

    def show(self, state: EngineState) -> None: ...
    def close(self) -> None: ...


class Screen:
    """Redraws one picture in place."""

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        """`transient`: closing it takes the picture away."""
        self._glyphs = glyphs_for(console.encoding)
        self._live = Live(console=console, auto_refresh=False, transient=transient)
        self._live.start()

    def show(self, state: EngineState) -> None:
        self._live.update(picture(state, self._glyphs), refresh=True)

    def close(self) -> None:
        self._live.stop()


class Lines:
    """Prints a summary now and then."""

    def __init__(self, out: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._next_s = 0.0

    def show(self, state: EngineState) -> None:
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + SECONDS_PER_LINE
            print("\n".join(summary_lines(state)), file=self._out, flush=True)

    def close(self) -> None:
        pass


def display_for(out: IO[str] = sys.stdout) -> Display:
    return Screen(Console(file=out)) if out.isatty() else Lines(out)


def picture(state: EngineState, glyphs: Glyphs) -> RenderableType:
    """Return everything at once, for a terminal of any width."""
    rows = state.rows
    shared = _shared(state.update.prefixes, glyphs)
    heading, table = _heading(state, glyphs), _table(rows, glyphs)
    return Group(heading, table, *shared, *_reasons(rows), _legend(glyphs))


def summary_lines(state: EngineState) -> list[str]:
    """Return the same in plain text: a line for the engine, one for each request."""
    update = state.update
    lines = [
        f"step {update.num_steps}: {_ms(update.observed_step_s)} "
        f"(predicted {_predicted(update)}){_brought(update)}, pool {_num_used(update)} of "
        f"{update.num_pool_blocks} blocks, {update.num_cached_tokens} tokens cached, "
        f"in time {_percent(state.attainment)}"
    ]
    for row in state.rows:
        request = row.request
        lines.append(
            f"  {name_of_request(request.request_id)}: {_state(row)[0]}{_why(row)}, generated "
            f"{request.num_generated_tokens}, delivered {row.num_delivered}, deposit "
            f"{row.num_deposited}, in time {_in_time(row)}"
            + (f", layers {layer_map(request, ASCII)}" if request.residency else "")
        )
    lines.extend(f"  {line.plain}" for line in _shared(state.update.prefixes, ASCII))
    return lines


def bar(row: Row, num_tokens: int, glyphs: Glyphs, *, width: int = BAR_WIDTH) -> Text:
    """Return what was delivered, what is deposited, and what is missing to `num_tokens` > 0."""
    num_read = round(width * row.num_delivered / num_tokens)
    num_here = round(width * row.request.num_generated_tokens / num_tokens)
    return Text.assemble(
        (glyphs.read * num_read, "green"),
        (glyphs.deposited * (num_here - num_read), "yellow"),
        (glyphs.open * (width - num_here), "dim"),
    )


def layer_map(kv: pb.ObservedRequest | pb.ObservedPrefix, glyphs: Glyphs) -> Text:
    """Return one character per layer group, first layers first."""
    drawn = {
        pb.RESIDENCY_RESIDENT: (glyphs.resident, "green"),
        pb.RESIDENCY_OFFLOADED: (glyphs.offloaded, "blue"),
        pb.RESIDENCY_RESTORING: (glyphs.restoring, "yellow"),
    }
    return Text.assemble(*(drawn.get(residency, ("?", "red")) for residency in kv.residency))


def spark_line(values: Sequence[float], levels: str) -> str:
    """Return one character per value, from zero to the largest."""
    largest = max(values, default=0.0) or 1.0
    return "".join(levels[round(value / largest * (len(levels) - 1))] for value in values)


def _heading(state: EngineState, glyphs: Glyphs) -> Text:
    update = state.update
    return Text.assemble(
        ("step ", "bold"),
        f"{_ms(update.observed_step_s)} observed, {_predicted(update)} predicted"
        f"{_brought(update)}  ",
        (spark_line(state.observed_s, glyphs.levels), "cyan"),
        "\n",
        ("pool ", "bold"),
        f"{_num_used(update)} of {update.num_pool_blocks} blocks used   ",
        ("cache ", "bold"),
        f"{update.num_cached_tokens} tokens   ",
        ("in time ", "bold"),
        f"{_percent(state.attainment)} of tokens",
    )


def _table(rows: Sequence[Row], glyphs: Glyphs) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("request", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("generated", "delivered", "deposit"):
        table.add_column(name, justify="right")
    table.add_column("delivered and deposited", no_wrap=True, min_width=BAR_WIDTH)
    table.add_column("in time", justify="right")
    table.add_column("KV by layer")
    num_tokens = max((row.request.num_generated_tokens for row in rows), default=0) or 1
    for row in rows:
        request = row.request
        table.add_row(
            name_of_request(request.request_id),
            Text(*_state(row)),
            str(request.num_generated_tokens),
            str(row.num_delivered),
            str(row.num_deposited),
            bar(row, num_tokens, glyphs),
            _in_time(row),
            Text() if row.is_ended else layer_map(request, glyphs),
        )
    return table


def _shared(prefixes: Sequence[pb.ObservedPrefix], glyphs: Glyphs) -> list[Text]:
    """Return a line for each part that requests have in the pool together."""
    return [
        Text.assemble(
            f"shared {prefix.num_tokens} tokens ",
            layer_map(prefix, glyphs),
            (f" of {', '.join(map(name_of_request, prefix.request_ids))}", "dim"),
        )
        for prefix in prefixes
    ]


def _legend(glyphs: Glyphs) -> Text:
    return Text(
        f"tokens: {glyphs.read} delivered {glyphs.deposited} deposit   layers: "
        f"{glyphs.resident} resident {glyphs.offloaded} offloaded {glyphs.restoring} coming back",
        style="dim",
    )


def _reasons(rows: Sequence[Row]) -> list[Text]:
    """Return a line for each reason why requests do not run."""
    waiting: dict[str, list[str]] = {}
    for row in rows:
        request = row.request
        if request.why_text and not row.is_ended and request.state not in RUNNING:
            waiting.setdefault(request.why_text, []).append(name_of_request(request.request_id))
    return [Text(f"{', '.join(names)}: {why}", "dim") for why, names in waiting.items()]


def _why(row: Row) -> str:
    """Return why a request runs or waits, in brackets; empty if that is not known."""
    return f" ({row.request.why_text})" if row.request.why_text and not row.is_ended else ""


def _state(row: Row) -> tuple[str, str]:
    """Return the name of a row's state and its style."""
    return ENDED if row.is_ended else STATES.get(row.request.state, UNKNOWN)


def _num_used(update: pb.WatchRequestsResponse) -> int:
    return update.num_pool_blocks - update.num_free_pool_blocks


def _predicted(update: pb.WatchRequestsResponse) -> str:
    return _ms(update.predicted_step_s) if update.HasField("predicted_step_s") else "-"


def _brought(update: pb.WatchRequestsResponse) -> str:
    """Return what a step brings a request, behind a comma; empty where nothing drafts."""
    drafts = update.HasField("tokens_per_step")
    return f", {update.tokens_per_step:.2f} tokens per request and step" if drafts else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _in_time(row: Row) -> str:
    """Return the share of tokens in time, and what made most of the others late."""
    cause = f" ({row.late_cause})" if row.late_cause else ""
    return _percent(row.attainment) + cause


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
