"""Rows as a markdown table; seconds are shown in milliseconds."""

from collections.abc import Mapping, Sequence
from typing import Any


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    names = list(rows[0])
    print(
        "\n| "
        + " | ".join(f"{name[:-2]} (ms)" if _is_time(name) else name for name in names)
        + " |"
    )
    print("|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(_shown(name, row[name]) for name in names) + " |")


def _is_time(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("per_s")


def _shown(name: str, value: Any) -> str:
    if _is_time(name):
        return f"{1e3 * value:.1f}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
