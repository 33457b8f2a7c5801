"""Tables of rows, column by column."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.document import Row


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a row: its name in a table, and how it is written."""

    title: str
    write: Callable[[Row], str]


def figure(title: str, name: str, spec: str) -> Column:
    """Return the column of a figure that every row has. `spec`: as for `format`."""
    return Column(title, lambda row: format(row[name], spec))


def number(title: str, name: str, decimals: int, scale: float = 1.0) -> Column:
    """Return the column of a figure; a dash where a row lacks it."""
    return Column(title, lambda row: f"{scale * row[name]:,.{decimals}f}" if name in row else "-")


IN_TIME = number("in time, %", "tbt_deposit", 2, 100)
REBUFFERING = number("rebuffering, %", "rebuffering", 2, 100)


def regime_of(row: Row) -> str:
    percent = 100 * row["lambda"]
    return f"{row['regime']} ({percent:.{1 if percent < 10 else 0}f} %)"


# What a row is of.
HEAD = (
    figure("regime", "regime", ""),
    Column("lambda", lambda row: f"{100 * row['lambda']:.1f} %"),
    figure("policy", "policy", ""),
)


def table_of(columns: Sequence[Column], rows: Sequence[Row]) -> list[list[str]]:
    """Return the rows' cells below their columns."""
    titles = [column.title for column in columns]
    return [titles, *([column.write(row) for column in columns] for row in rows)]
