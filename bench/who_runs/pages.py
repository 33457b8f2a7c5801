"""`python -m bench.who_runs.pages [NAME ...] --page PAGE`: tables of docs/results, simulated.

Virtual time: the same commit gives the same figures on any machine, however busy.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType

from bench.document import Benchmark, Row, measure_named
from bench.who_runs import ablation, beside_people, prefixes, readers_per_gpu, sessions
from bench.who_runs.__main__ import (
    DEFINITIONS,
    POLICIES,
    means,
    measured,
    table,
    verdicts,
)
from bench.who_runs.beside_best import TOKENS, in_turn, of_setting, pairs, ratio
from bench.who_runs.columns import IN_TIME, REBUFFERING, Column, number, regime_of
from bench.who_runs.reading_tables import READING_TABLES
from bench.who_runs.regimes import links

SEEDS = range(1, 4)
ORBITFLOW = ("orbitflow@1", "orbitflow@0")
OF_THE_PAPERS = (
    *("vllm", "evenflow", "tokenflow", "andes", "sglang", "fcfs-chunked", "vllm-recompute"),
    *("vllm-swap", "layerkv", "layerkv-park"),
)
HOST_FRACS = MappingProxyType({"F = 0.5": 0.5, "F = 1": 1.0, "F = 2": 2.0, "ample": None})
DECISIVE = ("bench 300 MB/s, S x 1.5", "7B, H100, 9k + 600, 0.7/s")
SETS_COMPARED = (
    *("bench 300 MB/s, S x 1.5", "bench 50 MB/s, S x 1.5", "bench 10 MB/s, S x 1.5"),
    *("7B, H100, 9k + 600, 1.0/s", "8B, H100, 24k + 800, 0.8/s", "8B, A5000, 6k + 800, 0.25/s"),
    *("ShareGPT, half, load 1.2", "OrbitFlow, load 3, S x 1.5", "TokenFlow, 4090 (a)"),
)
SHORT_OF_ROOM = (
    *("bench 300 MB/s, S x 1.5", "8B, A5000, 6k + 800, 0.25/s", "ShareGPT, half, load 1.2"),
    "TokenFlow, 4090 (b)",
)


TTFT = number("TTFT mean, s", "ttft_s", 2)
TPOT_MET = number("TPOT met, %", "tpot_deposit", 0, 100)
FOUND = number("found, %", "cached", 0, 100)


def beside_vllm(rows: Sequence[Row], others: Sequence[Column]) -> list[list[str]]:
    """Return `evenflow` beside the best setting of vLLM, each cell theirs → ours."""
    columns = (Column(TOKENS.title, of_setting(TOKENS)), TTFT, *others)
    ratios = ("tokens_per_s", "ttft_s")  # of the first columns
    titles = [column.title for column in columns]
    lines = [["regime (lambda)", titles[0], "ratio", titles[1], "ratio", *titles[2:]]]
    for pair in pairs(rows):
        theirs, ours = pair
        cells = [f"{column.write(theirs)} → {column.write(ours)}" for column in columns]
        first, second = (ratio(pair, name) for name in ratios)
        lines.append([regime_of(ours), cells[0], first, cells[1], second, *cells[2:]])
    return lines


def side_by_side(rows: Sequence[Row], policies: tuple[str, str]) -> list[list[str]]:
    """Return two policies, each cell the one's / the other's, and the second one's parks."""
    columns = (TOKENS, IN_TIME, TPOT_MET, REBUFFERING, TTFT, number("P95, s", "ttft_p95_s", 1))
    lines = [["regime (lambda)", *(column.title for column in columns), "parks"]]
    for of_one in in_turn(rows):
        first, second = (row for name in policies for row in of_one if row["policy"] == name)
        cells = (f"{column.write(first)} / {column.write(second)}" for column in columns)
        lines.append([regime_of(first), *cells, f"{second['parks']:.0f}"])
    return lines


def in_one_cell(row: Row) -> str:
    """Return tokens/s; in time / TPOT met / rebuffering, %; TTFT mean / P50 / P95, s; late ones."""
    kept = " / ".join(column.write(row) for column in (IN_TIME, TPOT_MET, REBUFFERING))
    ttfts = " / ".join(f"{row[name]:.1f}" for name in ("ttft_s", "ttft_p50_s", "ttft_p95_s"))
    late = f"; {100 * row['violations']:.0f} %" if "violations" in row else ""
    return f"{TOKENS.write(row)}; {kept}; {ttfts}{late}"


def crossed(rows: Sequence[Row], title: str) -> list[list[str]]:
    """Return a line for each `policy` and a column for each regime, a run's figures in a cell."""
    of_each = list(in_turn(rows))
    lines = [[title, *(regime_of(of_one[0]) for of_one in of_each)]]
    for of_policy in zip(*of_each, strict=True):
        lines.append([of_policy[0]["policy"], *map(in_one_cell, of_policy)])
    return lines


def with_host() -> list[Row]:
    """Return `vllm`, and `evenflow` with so much room on the host."""
    rows = means(measured, SHORT_OF_ROOM, ["vllm"], seeds=SEEDS)
    for name, host_frac in HOST_FRACS.items():
        measure = partial(measured, host_frac=host_frac)
        found = means(measure, SHORT_OF_ROOM, ["evenflow"], seeds=SEEDS)
        rows += [{**row, "policy": f"evenflow, {name}"} for row in found]
    return rows


def without_rules() -> list[Row]:
    """Return `evenflow` with one rule out of force, whose name stands for the policy's."""
    rules = list(ablation.WITHOUT)
    rows = means(ablation.run, ablation.REGIMES, rules, seeds=SEEDS)
    names = len(ablation.REGIMES) * rules
    return [{**row, "policy": rule} for row, rule in zip(rows, names, strict=True)]


def of_policies(regimes: Sequence[str], policies: Sequence[str]) -> list[Row]:
    return means(measured, regimes, policies, seeds=SEEDS)


def of_found(regimes: Callable[[], Sequence[str]], policies: Sequence[str]) -> list[Row]:
    return of_policies(regimes(), policies)


def named(*parts: str) -> Callable[[], list[str]]:
    """Return what finds the regimes whose names have a part of these."""
    return lambda: [name for name in links() if any(part in name for part in parts)]


def beside_links() -> list[str]:
    """Return the regimes in which requests begin unlike."""
    return [name for name in links() if name not in prefixes.regimes()]


def told(
    title: str,
    measure: Callable[[], list[Row]],
    written: Callable[[Sequence[Row]], list[list[str]]],
    said: Callable[[Sequence[Row]], list[str]] = lambda rows: [],
    definitions: dict[str, str] = DEFINITIONS,
) -> Callable[[str], Benchmark]:
    """Return what makes a table's benchmark of its name."""
    return lambda name: Benchmark(
        name=name,
        title=f"{title}: means of {len(SEEDS)} seeds, simulated",
        definitions=definitions,
        measure=measure,
        table=written,
        verdicts=said,
    )


TABLES = {
    "regimes": told(
        "Regimes of the link",
        partial(of_found, beside_links, POLICIES),
        partial(beside_vllm, others=(IN_TIME, REBUFFERING)),
        verdicts,
    ),
    "prefixes": told(
        "Requests that begin alike",
        partial(of_found, lambda: list(prefixes.regimes()), POLICIES),
        partial(beside_vllm, others=(FOUND, number("parks", "parks", 0))),
        verdicts,
    ),
    "policies": told("The papers' policies", partial(of_policies, DECISIVE, OF_THE_PAPERS), table),
    "joint": told(
        "Sets compared",
        partial(of_policies, SETS_COMPARED, ("vllm", "joint")),
        partial(side_by_side, policies=("vllm", "joint")),
    ),
    "alpha": told(
        "Late tokens that plans may allow",
        partial(of_found, named("OrbitFlow, load", "bench "), ORBITFLOW),
        partial(side_by_side, policies=ORBITFLOW),
    ),
    "host-room": told("Room on the host", with_host, partial(crossed, title="policy")),
    "sessions": told(
        "Agents that wait for tools",
        partial(of_found, lambda: list(sessions.regimes()), sessions.POLICIES),
        sessions.table,
        sessions.verdicts,
        sessions.DEFINITIONS,
    ),
    "people": told(
        "Agents beside people",
        partial(of_found, lambda: list(beside_people.regimes()), beside_people.POLICIES),
        beside_people.table,
        beside_people.verdicts,
        beside_people.DEFINITIONS,
    ),
    "readers-per-gpu": lambda name: Benchmark(
        name=name,
        title=f"Readers of {readers_per_gpu.RATE_TPS:g} tokens/s that a GPU holds, simulated",
        definitions=readers_per_gpu.DEFINITIONS,
        measure=readers_per_gpu.measured,
        table=readers_per_gpu.table,
    ),
    **{
        name: told(one.title, partial(one.measured, of_policies), one.write, verdicts)
        for name, one in READING_TABLES.items()
    },
    "ablation": told("One rule out of force", without_rules, partial(crossed, title="without")),
}


if __name__ == "__main__":
    measure_named(
        {name: partial(make, name) for name, make in TABLES.items()},
        prefix="who-runs",
        description=__doc__,
    )
