"""Readers at reading speed: vLLM at the best of its watermarks → `evenflow`, table by table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.document import Row
from bench.who_runs.beside_best import TOKENS, VLLM, in_turn, of_setting, pairs, ratio
from bench.who_runs.columns import IN_TIME, REBUFFERING, Column, number, regime_of
from bench.who_runs.reading import RATES_TPS, regimes

RATE = ", 5/s"  # of all tables but the last
BURST_RATES = (", 5/s", ", 8/s", ", 20/s")

Pair = tuple[Row, Row]  # vLLM's and ours
Cell = tuple[str, Callable[[Pair], str]]  # a column's title, and what it says


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingTable:
    """A table: its regimes, those of them that vLLM runs, and how it is written."""

    title: str
    regimes: Callable[[], list[str]]
    write: Callable[[Sequence[Row]], list[list[str]]]
    of_vllm: Callable[[str], bool] = lambda regime: True

    def measured(
        self, of_policies: Callable[[Sequence[str], Sequence[str]], list[Row]]
    ) -> list[Row]:
        """Return its rows. `of_policies`: the rows of regimes, by name, under policies."""
        names = self.regimes()
        theirs = of_policies([name for name in names if self.of_vllm(name)], VLLM)
        return theirs + of_policies(names, ("evenflow",))


def lined(cells: Sequence[Cell]) -> Callable[[Sequence[Row]], list[list[str]]]:
    """Return what writes a line for each regime."""

    def write(rows: Sequence[Row]) -> list[list[str]]:
        lines = [["regime (lambda)", *(title for title, _ in cells)]]
        for pair in pairs(rows):
            lines.append([_regime(pair[1]), *(cell(pair) for _, cell in cells)])
        return lines

    return write


def by_rate(rows: Sequence[Row]) -> list[list[str]]:
    """Return a line for each place and load, with a column for each rate of its readers: mean and
    P99 of TTFT, and tokens/s to vLLM's, which does the same at every rate.
    """
    rates = [f"{rate}/s" for rate in RATES_TPS]
    lines = [["regime (lambda)", "TTFT, `vllm`", *rates]]
    at_rates = [{**row, **_place_and_rate(row["regime"])} for row in rows]
    for of_one in in_turn(at_rates):
        theirs = next(theirs for theirs, _ in pairs(of_one))
        ours = {row["rate"]: row for row in of_one if row["policy"] == "evenflow"}
        cells = [_at_rate(theirs, ours.get(rate)) for rate in rates]
        lines.append([_regime(theirs), _mean_and_p99(theirs), *cells])
    return lines


def _regime(row: Row) -> str:
    return regime_of(row).removeprefix("reading: ")


def _place_and_rate(regime: str) -> dict[str, str]:
    place, _, rate = regime.rpartition(", ")
    return {"regime": place, "rate": rate}


def _at_rate(theirs: Row, ours: Row | None) -> str:
    if ours is None:
        return "-"
    return f"{_mean_and_p99(ours)}; {ratio((theirs, ours), 'tokens_per_s')}"


def _mean_and_p99(row: Row) -> str:
    return f"{row['ttft_s']:.2f} / {row['ttft_p99_s']:.1f}"


def _ttft(row: Row) -> str:
    return f"{row['ttft_s']:.2f} / {row['ttft_p50_s']:.2f} / {row['ttft_p99_s']:.1f}"


def _both(column: Column) -> Cell:
    return column.title, lambda pair: f"{column.write(pair[0])} → {column.write(pair[1])}"


def _beside(column: Column) -> Cell:
    """Return both, with vLLM's setting."""
    return _both(Column(column.title, of_setting(column)))


THROUGHPUT: tuple[Cell, ...] = (
    _beside(TOKENS),
    ("ratio", lambda pair: ratio(pair, "tokens_per_s")),
)
TTFTS: tuple[Cell, ...] = (
    ("TTFT, `vllm`", lambda pair: _ttft(pair[0])),
    ("`evenflow`", lambda pair: _ttft(pair[1])),
)
REST: tuple[Cell, ...] = (
    _both(REBUFFERING),
    ("parks", lambda pair: f"{pair[1]['parks']:.0f}"),
)
STEADY = lined(
    (
        *(*THROUGHPUT, *TTFTS),
        (
            "mean, P99 to `vllm`'s",
            lambda pair: f"{ratio(pair, 'ttft_s')} / {ratio(pair, 'ttft_p99_s')}",
        ),
        (IN_TIME.title, lambda pair: IN_TIME.write(pair[1])),
        *REST,
    )
)
OF_BURSTS = lined(
    (
        *(*THROUGHPUT, *TTFTS),
        (
            "fluid, P50 / P99",
            lambda pair: f"{pair[1]['fluid_ttft_p50_s']:.1f} / {pair[1]['fluid_ttft_p99_s']:.1f}",
        ),
        *REST,
    )
)
BESIDE_AGENTS = lined(
    (
        *THROUGHPUT,
        _both(number("people within 2 s, %", "people_within_slo", 0, 100)),
        _both(number("people's TTFT", "people_ttft_s", 2)),
        _both(number("agents' TTFT", "agents_ttft_s", 2)),
        _both(number("agents' end, s", "agents_e2e_s", 1)),
        ("ratio", lambda pair: ratio(pair, "agents_e2e_s")),
    )
)
OF_LEAVERS = lined(
    (
        _beside(number("tokens/s that were read", "read_tokens_per_s", 0)),
        _both(number("never read, %", "unread", 1, 100)),
        _both(number("never made, %", "unmade", 1, 100)),
        *TTFTS,
    )
)


def _chosen(holds: Callable[[str], bool]) -> Callable[[], list[str]]:
    return lambda: [name for name in regimes() if holds(name)]


def _is_of(name: str, kind: str) -> bool:
    """Say whether a regime's readers, and the room on the host, are those of a kind alone."""
    others = {"half leaving", "people and agents", "small host"} - {kind}
    return kind in name and not any(other in name for other in others)


def _is_in_matrix(name: str) -> bool:
    """Say whether a regime is one of each rate: bursts at three of them."""
    return _is_of(name, ", load ") or (_is_of(name, ", burst ") and name.endswith(BURST_RATES))


READING_TABLES = {
    "reading-steady": ReadingTable(
        title="Readers of 5 tokens/s",
        regimes=_chosen(lambda name: _is_of(name, ", load ") and name.endswith(RATE)),
        write=STEADY,
    ),
    "reading-bursts": ReadingTable(
        title="Bursts, read at 5 tokens/s",
        regimes=_chosen(lambda name: "burst" in name and name.endswith(RATE)),
        write=OF_BURSTS,
    ),
    "reading-agents": ReadingTable(
        title="People beside agents",
        regimes=_chosen(lambda name: _is_of(name, "people and agents")),
        write=BESIDE_AGENTS,
    ),
    "reading-leavers": ReadingTable(
        title="Half of the readers leave",
        regimes=_chosen(lambda name: _is_of(name, "half leaving")),
        write=OF_LEAVERS,
    ),
    "reading-rates": ReadingTable(
        title="Readers of 4 to 20 tokens/s",
        regimes=_chosen(_is_in_matrix),
        write=by_rate,
        of_vllm=lambda name: name.endswith(RATE),  # it does the same at every rate
    ),
}
