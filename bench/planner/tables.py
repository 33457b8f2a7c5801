"""Markdown tables, printed row by row as the figures come."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]


def printed(
    title: str, columns: Sequence[str], rows: Iterable[tuple[Row, Sequence[str]]]
) -> Iterator[Row]:
    """Print a table whose cells come with each row; yields the rows."""
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for row, cells in rows:
        print(f"| {' | '.join(cells)} |", flush=True)
        yield row


def ms(figure: Row, *quantiles: str) -> str:
    return " / ".join(f"{figure[quantile] * 1e3:.2f}" for quantile in quantiles)


def percent(figure: Row, *quantiles: str, digits: int = 2) -> str:
    if not figure["count"]:
        return "-"
    return " / ".join(f"{figure[quantile] * 1e2:.{digits}f}" for quantile in quantiles)
