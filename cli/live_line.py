"""An answer as it arrives: on a terminal with one changing line below it, elsewhere bare."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Protocol

from rich.cells import cell_len, chop_cells
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cli.client.answer import Piece
from cli.client.engine_watch import EngineState, Row, followed
from services.kit.rpc import name_of_request

REFRESHES_PER_S = 10.0
UPDATES_PER_S = 8.0
# What a model must not do to a terminal; tabs would upset the count of columns.
HARMLESS = {code: None for code in (*range(32), 127) if chr(code) not in "\t\n"} | {9: "    "}


@dataclass(slots=True)
class Progress:
    """How far an answer is. One thread takes pieces, one rows, one reads."""

    sent_s: float
    num_read: int = 0  # tokens that reached this client
    last_s: float | None = None  # when the newest did
    gap_s: float | None = None  # between the two newest
    row: Row | None = None  # as the scheduler sees the request; None: not known

    def take(self, piece: Piece) -> None:
        self.num_read += piece.num_tokens
        if self.last_s is not None:
            self.gap_s = piece.arrived_s - self.last_s
        self.last_s = piece.arrived_s

    def see(self, row: Row | None) -> None:
        """Take over the request's row. Once it is gone, nothing is in deposit."""
        if row is None and self.row is not None:
            row = replace(self.row, num_deposited=0, is_ended=True)
        self.row = row

    def line(self, now_s: float) -> str:
        """Return what is known, in tokens and milliseconds."""
        parts = [f"read {self.num_read}"]
        if self.row is not None:
            parts.append(f"generated {self.row.request.num_generated_tokens}")
            parts.append(f"in deposit {self.row.num_deposited}")
        if self.last_s is None:
            return "  ".join([*parts, f"first token: {_ms(now_s - self.sent_s)} so far"])
        if self.gap_s is not None:
            parts.append(f"gap {_ms(self.gap_s)}")
        return "  ".join([*parts, f"last token {_ms(now_s - self.last_s)} ago"])


class Display(Protocol):
    """Shows one answer until it is closed."""

    def show(self, text: str) -> None: ...
    def close(self) -> None: ...


class Bare:
    """Writes an answer as it comes."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._is_in_line = False

    def show(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
        self._is_in_line = not text.endswith("\n") if text else self._is_in_line

    def close(self) -> None:
        if self._is_in_line:
            self._out.write("\n")
            self._out.flush()


class Screen:
    """Writes an answer as it comes, with a line about its progress below.

    Lines that are full are the terminal's own and scroll away as usual; only the last one and the
    one about the progress are drawn anew.
    """

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._open = ""  # the answer's last line, so far
        self._live = Live(
            get_renderable=self._picture,
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def show(self, text: str) -> None:
        text = self._open + text.translate(HARMLESS)
        *full, self._open = folded(text, self._console.width - 1)
        if full:
            self._console.print(Text("\n".join(full)), soft_wrap=True)
        self._live.refresh()

    def close(self) -> None:
        self._live.stop()
        if self._open:
            self._console.print(Text(self._open), soft_wrap=True)

    def _picture(self) -> RenderableType:
        line = self._progress.line(time.monotonic())
        return Group(Text(self._open), Text(line, style="dim", no_wrap=True, overflow="ellipsis"))


def display_for(console: Console, progress: Progress) -> Display:
    if console.is_terminal and not console.is_dumb_terminal:
        return Screen(console, progress)
    return Bare(console.file)


def folded(text: str, width: int) -> list[str]:
    """Return the lines of a text, at least one, none wider than `width` > 1 columns.

    They break at spaces, or in a word that is wider than a line.
    """
    lines: list[str] = []
    for paragraph in text.split("\n"):
        rest = paragraph
        while cell_len(rest) > width:
            head = chop_cells(rest, width)[0]
            cut = len(head)
            if rest[cut] != " " and " " in head.strip():
                cut = head.rindex(" ")
            lines.append(rest[:cut].rstrip())
            rest = rest[cut:].lstrip(" ")
        lines.append(rest)
    return lines


@contextmanager
def watched(address: str, request_id: str, see: Callable[[Row | None], None]) -> Iterator[None]:
    """While the block runs, call `see` with a request's row, from another thread."""

    def find(state: EngineState) -> None:
        rows = {name_of_request(row.request.request_id): row for row in state.rows}
        see(rows.get(request_id))

    with followed(address, updates_per_s=UPDATES_PER_S, see=find):
        yield


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
