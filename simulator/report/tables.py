"""Tables for a terminal."""

from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Row = Mapping[str, float | str]
WIDE = 160  # columns of a terminal that has room for every figure


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _ms(value: float) -> str:
    return f"{1e3 * value:.0f}"


def _count(value: float) -> str:
    return f"{value:.0f}"


Column = tuple[str, str, Callable[[float], str]]
COLUMNS: Sequence[Column] = (
    ("rate_per_s", "req/s", lambda value: f"{value:g}"),
    ("slo_tbt_s", "SLO ms", _ms),
    ("tbt", "TBT %", _percent),
    ("tbt_deposit", "TBT+D %", _percent),
    ("tpot_deposit", "TPOT+D %", _percent),
    ("p99_s", "P99 ms", _ms),
    ("ttft_s", "TTFT s", lambda value: f"{value:.2f}"),
    ("tokens_per_s", "tok/s", _count),
)
COLUMNS_OF_SESSIONS: Sequence[Column] = (
    *COLUMNS[:2],
    *COLUMNS[5:],
    ("next_ttft_p50_s", "next P50", _ms),
    ("next_ttft_p95_s", "next P95", _ms),
    ("recomputed_tokens", "again", _count),
)
MORE_COLUMNS: Sequence[Column] = (
    ("tpot", "TPOT %", _percent),
    ("p95_s", "P95 ms", _ms),
    ("pool", "pool %", _percent),
    ("stall", "stall %", _percent),
    ("cached", "cached %", _percent),
    ("pauses", "pauses", _count),
    ("preemptions", "preempt", _count),
    ("rejected", "reject", _count),
)


def print_rows(rows: Sequence[Row], title: str, console: Console) -> None:
    """Print one line per cell; "+D" is behind Token-Deposit. Narrow terminals get fewer figures.

    "next" is the time to the first token of a session's steps that follow others, in ms; "again"
    are tokens that were computed again.
    """
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDE)
    columns, more = COLUMNS, MORE_COLUMNS
    if any("next_ttft_p50_s" in row for row in rows):
        columns, more = COLUMNS_OF_SESSIONS, MORE_COLUMNS[2:]
    columns = [*columns, *(more if console.width >= WIDE else ())]
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for _, heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [shown(float(row[name])) if name in row else "-" for name, _, shown in columns]
        table.add_row(str(row["policy"]), *cells)
    console.print(table)
