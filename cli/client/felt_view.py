"""What readers felt, as a table in the manner of vLLM's."""

from collections.abc import Sequence

from cli.client.felt import Felt
from services.pacing.attainment import DELIVERY_TOLERANCE_S

TITLE = " What The Readers Felt, As Delivered "
# Heading and width of each column.
COLUMNS = (
    ("read", 7), ("n", 4), ("p50", 6), ("p95", 6), ("p99", 6), ("in SLO", 7),
    ("in time", 8), ("late", 5), ("p50", 6), ("p95", 6), ("max", 6), ("buffer", 7), ("tok/s", 6),
)  # fmt: skip
GROUPS = (("", 11), ("TTFT (ms)", 25), ("tokens", 13), ("waited (s)", 18), ("re-", 7), ("each", 6))
NOTES = (
    "read: reading rate, tokens/s. Promised: S = 1 / rate, else the TBT, else the",
    f"TPOT SLO. late: more than {DELIVERY_TOLERANCE_S * 1e3:.0f} ms after S past the turn of the "
    "token before.",
    "waited: with nothing to read, per reader. rebuffer: waited / reading.",
)
WIDTH = sum(width for _, width in COLUMNS)


def felt_table(rows: Sequence[Felt], notes: Sequence[str] = ()) -> str:
    """Return a row for each, below headings and above what they mean and further notes."""
    lines = [
        TITLE.center(WIDTH, "="),
        "".join(name.rjust(width) for name, width in GROUPS),
        "".join(name.rjust(width) for name, width in COLUMNS),
        *map(_line, rows),
        "-" * WIDTH,
        *NOTES,
        *notes,
        "=" * WIDTH,
    ]
    return "\n".join(lines)


def after_thoughts(row: Felt) -> str:
    """Return when answers began that were thought about; their pace is counted from there."""
    p50, p95 = (_scaled(one, 1e3, 0) for one in (row.ttfat_p50_s, row.ttfat_p95_s))
    return f"TTFT of the answer, after {row.num_thoughts} thoughts: p50 {p50}, p95 {p95} ms."


def _line(row: Felt) -> str:
    cells = (
        row.readers,
        str(row.num_requests),
        _scaled(row.ttft_p50_s, 1e3, 0),
        _scaled(row.ttft_p95_s, 1e3, 0),
        _scaled(row.ttft_p99_s, 1e3, 0),
        _percent(row.ttft_in_time_frac),
        _percent(row.in_time_frac),
        "-" if row.num_stalls is None else str(row.num_stalls),
        _scaled(row.waited_p50_s, 1, 2),
        _scaled(row.waited_p95_s, 1, 2),
        _scaled(row.waited_max_s, 1, 2),
        _percent(row.rebuffering_frac),
        _scaled(row.tokens_per_s, 1, 1),
    )
    return "".join(cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def _scaled(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
