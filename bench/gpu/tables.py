"""What was measured, as tables."""

from collections.abc import Iterable, Mapping
from typing import Any

DEFINITIONS = {
    "link": "rate of the copy engine on scattered pages, or on runs of them, best of five; share: "
    "of one plain copy of pinned memory",
    "order": "blocks that layers read, checked on the device, and those that held something else; "
    "with something left out there must be some",
    "overlap": "copy_s: one layer's blocks of one request; step_s: first layer's beginning to last "
    "one's end; path_s: longest path through measured layers and copies",
    "loads": "processor time of the engine's thread for the submission of a load and its wait, "
    "of the same blocks step after step and of others each time",
    "marks": "step with and without the marks that times are read from",
    "small": "what 4 KiB take to the host on the compute stream, copies of KV beside them",
    "pinning": "a graph captured with memory pinned before or by a thread meanwhile; memlock: "
    "pinning beyond `ulimit -l`",
    "exactness": "greedy tokens equal to stock vLLM's, both with VLLM_BATCH_INVARIANT=1 on a GPU; "
    "with something left out they must differ",
    "cost": "median wall time of a decode step by batch; nothing is offloaded",
    "engine-overlap": "median wall time of a decode step of a batch; stall_s: over the run",
}


def print_tables(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table per part, of results by cell."""
    by_part: dict[str, list[dict[str, Any]]] = {}
    for cell, line in results.items():
        part, _, name = cell.partition("/")
        rows = by_part.setdefault(part, [])
        rows += [{"cell": name, **row} for row in line["rows"]]
    for part, rows in by_part.items():
        devices = {line["device"] for cell, line in results.items() if cell.startswith(part + "/")}
        print(f"\n{part}, {', '.join(sorted(devices))}: {DEFINITIONS[part]}")
        for text in _table(rows if part != "exactness" else _compared(rows)):
            print(text)


def _compared(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Set each run's tokens beside those of stock vLLM run in the same way."""
    rows = list(rows)
    stock = {_way_of(row): row["tokens"] for row in rows if row["cell"].startswith("stock")}
    found = []
    for row in rows:
        identical = row["tokens"] == stock.get(_way_of(row))
        broken = row["broken"]
        found.append(
            {
                **{name: value for name, value in row.items() if name != "tokens"},
                "identical": identical,
                "as_it_should": identical != bool(broken),
            }
        )
    return found


def _way_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which graphs, runner and KV a row is of: its name without what is left out."""
    _, *way = row["cell"].split(",")
    return tuple(part for part in way if part != row["broken"])


def _table(rows: list[dict[str, Any]]) -> Iterable[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, *([_text(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    for line in lines:
        yield "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
