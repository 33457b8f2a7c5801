"""Four readers at once, whose KV the pool does not hold together; and what each of them felt."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.table import Table

from cli.client.answer import PacedAnswer, Question, stream_answer
from cli.client.engine_view import Screen
from cli.client.engine_watch import EngineState, EngineWatch
from cli.local.settings import StackSettings
from demo.questions import question
from demo.texts import READERS_QUESTIONS, readers_text
from services.pacing.reading import Reading, reading_of

UPDATES_PER_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One that asks, and its pace."""

    name: str
    rate_tps: float  # tokens per second


READERS = (
    Reader(name="slow", rate_tps=4.0),
    Reader(name="steady", rate_tps=5.0),
    Reader(name="quick", rate_tps=6.0),
    Reader(name="hasty", rate_tps=7.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Felt:
    """What one reader got."""

    reader: Reader
    answer: PacedAnswer

    @property
    def reading(self) -> Reading:
        return reading_of(self.answer.arrived_s, 1 / self.reader.rate_tps)

    @property
    def in_time_frac(self) -> float:
        """Return the share of tokens after the first that came when they were due, in [0, 1]."""
        return 1 - self.reading.num_late / max(1, self.reading.num_gaps)


def show_readers(settings: StackSettings, readers: Sequence[Reader], num_tokens: int) -> list[Felt]:
    """Show the engine while the readers read `num_tokens` each, in place, where the output is a
    terminal; return what each of them got.
    """
    watch = EngineWatch(settings.address("executor"), updates_per_s=UPDATES_PER_S)
    waiting = set(readers)

    def leave(reader: Reader, answer: Future[PacedAnswer]) -> None:
        waiting.discard(reader)
        if not waiting:
            watch.stop()

    with ThreadPoolExecutor(len(readers)) as threads:
        answers: list[Future[PacedAnswer]] = []
        for number, reader in enumerate(readers):
            asked = _question(number, reader, num_tokens)
            answers.append(threads.submit(_ask, settings, reader, asked))
            answers[-1].add_done_callback(partial(leave, reader))
        with live_view(Console()) as show:
            for state in watch.states():
                show(state)
    return [
        Felt(reader=reader, answer=answer.result())
        for reader, answer in zip(readers, answers, strict=True)
    ]


@contextmanager
def live_view(console: Console) -> Iterator[Callable[[EngineState], None]]:
    """Give what shows an engine's state: one picture, which is redrawn and then taken away. Off a
    terminal it shows nothing.
    """
    if not console.is_terminal:
        yield lambda state: None
        return
    screen = Screen(console, transient=True)
    try:
        yield screen.show
    finally:
        screen.close()


def in_short(felt: Sequence[Felt]) -> str:
    """Return one line of what all readers felt."""
    ttft, in_time, waited = _sums(felt)
    return f"first token after {ttft} (mean), {in_time} of tokens in time, {waited} waited in all"


def comparison(ours: Sequence[Felt], theirs: Sequence[Felt], *, link_share: float) -> Table:
    """Return one table of what the same readers felt on both; `link_share` is its lambda."""
    table = Table(
        title=f"What the readers felt (lambda {link_share:.0%}: what the link moves in a step, "
        "of the pool)"
    )
    table.add_column("reader", no_wrap=True)
    table.add_column("tokens/s", justify="right")
    for server in ("Evenflow", "vLLM"):
        for figure in ("first token", "in time", "waited"):
            table.add_column(f"{server}\n{figure}", justify="right", no_wrap=True)
    for mine, stock in zip(ours, theirs, strict=True):
        rate = f"{mine.reader.rate_tps:.3g}"
        table.add_row(mine.reader.name, rate, *_figures(mine), *_figures(stock))
    table.add_section()
    table.add_row("all", "", *_sums(ours), *_sums(theirs))
    return table


def _figures(felt: Felt) -> tuple[str, str, str]:
    return (
        f"{felt.answer.ttft_s:.1f} s",
        f"{felt.in_time_frac:.1%}",
        f"{felt.reading.waited_s:.1f} s",
    )


def _sums(felt: Sequence[Felt]) -> tuple[str, str, str]:
    num_gaps = sum(one.reading.num_gaps for one in felt)
    num_late = sum(one.reading.num_late for one in felt)
    return (
        f"{sum(one.answer.ttft_s for one in felt) / len(felt):.1f} s",
        f"{1 - num_late / max(1, num_gaps):.1%}",
        f"{sum(one.reading.waited_s for one in felt):.1f} s",
    )


def _question(number: int, reader: Reader, num_tokens: int) -> Question:
    """Return a question behind a text of the reader's own."""
    return question(
        READERS_QUESTIONS[number],
        context=readers_text(number),
        max_tokens=num_tokens,
        request_id=f"{reader.name}-{secrets.token_hex(2)}",
    )


def _ask(settings: StackSettings, reader: Reader, asked: Question) -> PacedAnswer:
    return stream_answer(
        settings.base_url,
        settings.model_id,
        asked,
        rate_tps=reader.rate_tps,
        show=lambda piece: None,
    )
