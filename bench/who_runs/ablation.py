"""`python -m bench.who_runs.ablation`: what is each rule of `evenflow` worth?

The same requests with one rule after the other out of force. "Late first": of requests that
state a TTFT SLO those whose first token comes later.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from bench.document import Row
from bench.who_runs.__main__ import mean_of, measured
from services.placement.run import evenflow, promise, prompts

Change = tuple[Any, str, Any]  # object, attribute, what stands there instead


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _everybody(snapshot: Any, members: Any) -> frozenset[str]:
    return frozenset(request.request_id for request in members)


def _rules(**given: Any) -> Change:
    return evenflow.decide, "__defaults__", (replace(evenflow.DEFAULT_RULES, **given),)


WITHOUT: Mapping[str, Change | None] = MappingProxyType(
    {
        "all rules": None,
        "no layers on the host": (evenflow._Draft, "_pays", _always(False)),
        "*generates no slower* off": (evenflow._Draft, "_pays", _always(True)),
        "prompts need not be covered": (evenflow, "are_hidden", _always(True)),
        "nobody takes turns": (evenflow, "can_take_turns", _always(False)),
        "turns however few fit": (evenflow, "can_take_turns", _always(True)),
        "nothing is promised": (promise.Promise, "holds", _always(False)),
        "everything is promised": (promise.Promise, "holds", _always(True)),
        "all are sure": (evenflow, "sure_ones", _everybody),
        "room left stays empty": (evenflow._Draft, "fill_room", _always(None)),
        "pieces however few fit": (prompts, "holds_few", _always(False)),
        "chunks as vLLM's": (evenflow, "chunk_tokens", _always(None)),
        "TTFT SLOs by arrival": (evenflow, "in_line", list),
        "any number of prompts": _rules(most_prompts=512),
        "short pieces always": _rules(slow_frac=-1.0),
    }
)
REGIMES = (
    "bench 300 MB/s, S x 1.5",
    "7B, H100, 9k + 600, 1.0/s",
    "7B, H100, TTFT SLOs, 0.7/s",
    "8B, A5000, 6k + 800, 0.25/s",
)
COLUMNS = (
    *("regime", "rules", "tokens/s", "in time", "TPOT met", "rebuffering"),
    *("TTFT mean / P50 / P95, s", "late first", "parks"),
)


def run(regime: str, rules: str, seed: int) -> Row:
    """Return the figures of one run with a rule out of force."""
    change = WITHOUT[rules]
    if change is None:
        return measured(regime, "evenflow", seed)
    with patch.object(*change):
        return measured(regime, "evenflow", seed)


def cells_of(row: Row, rules: str) -> Iterator[str]:
    yield row["regime"]
    yield rules
    yield f"{row['tokens_per_s']:.1f}"
    for name, decimals in (("tbt_deposit", 2), ("tpot_deposit", 0), ("rebuffering", 2)):
        yield f"{100 * row[name]:.{decimals}f} %"
    yield " / ".join(f"{row[name]:.1f}" for name in ("ttft_s", "ttft_p50_s", "ttft_p95_s"))
    yield f"{100 * row['violations']:.0f} %" if "violations" in row else "-"
    yield f"{row['parks']:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=REGIMES, help="regimes")
    parser.add_argument("--rules", nargs="*", default=list(WITHOUT), choices=WITHOUT)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    seeds = range(1, options.seeds + 1)
    cells = list(product(options.only, options.rules))
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = pool.map(
            run, *zip(*((*cell, seed) for cell in cells for seed in seeds), strict=True)
        )
        for _, rules in cells:
            row = mean_of([next(runs) for _ in seeds])
            print("| " + " | ".join(cells_of(row, rules)) + " |", flush=True)


if __name__ == "__main__":
    main()
