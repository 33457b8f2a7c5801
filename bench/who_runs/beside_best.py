"""vLLM at the best of its settings, which `evenflow` is held against in each regime."""

from collections.abc import Callable, Iterator, Sequence

from bench.document import Row
from bench.who_runs.columns import Column, number

VLLM = ("vllm", "vllm@0.02", "vllm@0.05")  # at its watermarks
TOKENS = number("tokens/s", "tokens_per_s", 1)


def in_turn(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield the rows of each regime."""
    for regime in dict.fromkeys(row["regime"] for row in rows):
        yield [row for row in rows if row["regime"] == regime]


def pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield of each regime that has both the row of vLLM's best setting, and that of `evenflow`."""
    for of_one in in_turn(rows):
        theirs = [row for row in of_one if row["policy"] in VLLM]
        for ours in of_one:
            if theirs and ours["policy"] == "evenflow":
                yield best_vllm(theirs), ours


def best_vllm(rows: Sequence[Row]) -> Row:
    """Return the row of vLLM's best setting."""
    most = max(row["tokens_per_s"] for row in rows)
    near = [row for row in rows if row["tokens_per_s"] >= 0.998 * most]
    return min(near, key=lambda row: row["ttft_s"])


def of_setting(column: Column) -> Callable[[Row], str]:
    """Return what writes a figure, and of vLLM's settings which, where it is not the plain one."""

    def write(row: Row) -> str:
        _, _, watermark = row["policy"].partition("@")
        is_set = row["policy"] in VLLM and watermark
        return column.write(row) + (f" ({watermark})" if is_set else "")

    return write


def ratio(pair: tuple[Row, Row], name: str) -> str:
    """Write how large a figure of `evenflow` is to vLLM's."""
    theirs, ours = pair
    return f"{ours[name] / theirs[name]:.3f}"
