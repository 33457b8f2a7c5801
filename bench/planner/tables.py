"""Markdown tables, printed row by row as the figures come."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.document import table_lines

Row = dict[str, Any]


class Table:
    """A table whose cells come with each row."""

    def __init__(
        self, title: str, columns: Sequence[str], rows: Iterable[tuple[Row, Sequence[str]]]
    ) -> None:
        self.title = title
        self.cells = [columns]  # header first; a line for each row that has come
        self._rows = rows

    def printed(self) -> Iterator[Row]:
        """Print the table, line by line; yields the rows."""
        print(f"\n{self.title}\n", *table_lines(self.cells), sep="\n", flush=True)
        for row, cells in self._rows:
            self.cells.append(cells)
            print(table_lines(self.cells)[-1], flush=True)
            yield row


def ms(figure: Row, *quantiles: str) -> str:
    return " / ".join(f"{figure[quantile] * 1e3:.2f}" for quantile in quantiles)


def percent(figure: Row, *quantiles: str, digits: int = 2) -> str:
    if not figure["count"]:
        return "-"
    return " / ".join(f"{figure[quantile] * 1e2:.{digits}f}" for quantile in quantiles)
