"""The show: a paced answer, a prompt larger than the pool, four readers, and vLLM beside them."""

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.console import Console

from cli.client.answer import PacedAnswer, stream_answer, summary
from cli.client.engine_watch import EngineState, WatchError, followed
from cli.local.settings import StackSettings
from cli.local.stack import Stack
from demo.kv_figures import read_figures
from demo.long_prompt import LongAnswer, show_long_prompt
from demo.questions import question
from demo.readers import READERS, Felt, Reader, comparison, in_short, show_readers
from demo.texts import QUESTION
from services.gateway.types import MIN_RATE_TPS
from services.placement.link_ratio import link_ratio

READING_RATE_TPS = 5.0  # some 4 words per second, as people read
LOOKS_PER_S = 20.0  # of the watch that measures steps
PLAIN_WIDTH = 100  # columns of a table that goes to no terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Programme:
    """How much is shown."""

    num_tokens: int  # of the first answer, at most
    num_long_tokens: int  # of the answer behind the long text
    num_readers_tokens: int  # of each reader's
    # Readers read a token in this many steps of the engine or more; 0: at their own rates only.
    steps_per_token: float


FULL = Programme(num_tokens=56, num_long_tokens=24, num_readers_tokens=64, steps_per_token=0)
# On any machine, however slow it is at the moment, its readers can be in time.
SHORT = Programme(num_tokens=12, num_long_tokens=6, num_readers_tokens=24, steps_per_token=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What has happened, for those who check it."""

    paced: PacedAnswer
    long: LongAnswer
    readers: list[Felt]
    readers_on_stock: list[Felt]
    link_share: float  # lambda: bytes that the link moves in a resident step / bytes of the pool


def show(programme: Programme, ours: StackSettings, theirs: Stack) -> Shown:
    """Show everything on two stacks that are ready; `theirs` is stopped when its turn is over.

    In a terminal answers stand there as they are read, and engines are one picture that is redrawn;
    elsewhere there is a line or two for each phase.
    """
    print(f"\n> {QUESTION}  (read at {READING_RATE_TPS:g} tokens/s)\n")
    states = deque[EngineState](maxlen=1)
    with followed(ours.address("executor"), updates_per_s=LOOKS_PER_S, see=states.append):
        paced = _show_paced(programme, ours)
    resident_step_s = _step_s(states)
    print(f"\n\n{summary(paced, rate_tps=READING_RATE_TPS)}\n")

    print(f"> {QUESTION}  (behind a text that does not fit the KV pool)\n")
    long = show_long_prompt(ours, READING_RATE_TPS, programme.num_long_tokens)
    print(f"\n\n{summary(long.answer, rate_tps=READING_RATE_TPS)}\n{long.report()}\n")

    readers = _readers(programme, resident_step_s)
    print(f"> {len(readers)} readers at once, whose KV does not fit the pool together\n")
    felt = show_readers(ours, readers, programme.num_readers_tokens)
    print(f"{in_short(felt)}\n\n> the same readers, on vLLM's own policy\n")
    on_stock = show_readers(theirs.settings, readers, programme.num_readers_tokens)
    theirs.stop()
    print(in_short(on_stock))
    link_share = _link_share(ours, resident_step_s)
    return Shown(
        paced=paced,
        long=long,
        readers=felt,
        readers_on_stock=on_stock,
        link_share=link_share,
    )


def print_table(shown: Shown) -> None:
    """Print what the readers felt on both stacks, side by side."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    table = comparison(shown.readers, shown.readers_on_stock, link_share=shown.link_share)
    console.print(table)


def _show_paced(programme: Programme, settings: StackSettings) -> PacedAnswer:
    return stream_answer(
        settings.base_url,
        settings.model_id,
        question(QUESTION, max_tokens=programme.num_tokens),
        rate_tps=READING_RATE_TPS,
        show=lambda piece: print(piece, end="", flush=True),
    )


def _step_s(states: Iterable[EngineState]) -> float:
    """Return the median of the engine's steps. Raises WatchError if none was seen."""
    steps_s = [step_s for state in states for step_s in state.observed_s]
    if not steps_s:
        raise WatchError("the executor told of no step")
    return median(steps_s)


def _readers(programme: Programme, step_s: float) -> Sequence[Reader]:
    """Return the readers, all slowed alike if the engine's step `step_s` asks for it."""
    if not programme.steps_per_token:
        return READERS
    quickest_tps = max(reader.rate_tps for reader in READERS)
    slowing = min(1.0, 1 / (programme.steps_per_token * step_s * quickest_tps))
    return [
        replace(reader, rate_tps=max(MIN_RATE_TPS, slowing * reader.rate_tps)) for reader in READERS
    ]


def _link_share(settings: StackSettings, resident_step_s: float) -> float:
    figures = read_figures(settings)
    pool_bytes = int(settings.variables["EVENFLOW_EXECUTOR_KV_CACHE_MEMORY_BYTES"])
    return link_ratio(
        link_bytes_per_s=figures.h2d_bytes / figures.h2d_busy_s,
        step_s=resident_step_s,
        pool_bytes=pool_bytes,
    )
