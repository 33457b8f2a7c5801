"""When a delivered token counts as late, and the per-request latency figures."""

from collections.abc import Sequence

DELIVERY_TOLERANCE_S = 0.005  # epsilon; printed with every figure that uses it
ROUNDING_S = 1e-9  # of sums of intervals, where times have no noise to tolerate


def violates_delivered_tbt(
    written_s: float,
    previous_due_s: float,
    interval_s: float,
    *,
    tolerance_s: float = DELIVERY_TOLERANCE_S,
) -> bool:
    """Say whether a token reached the client later than d_{k-1} + S + epsilon."""
    return written_s > previous_due_s + interval_s + tolerance_s


def tpot_s(written_s: Sequence[float]) -> float | None:
    """Return the mean time per output token after the first; None below two tokens."""
    if len(written_s) < 2:
        return None
    return (written_s[-1] - written_s[0]) / (len(written_s) - 1)


def meets_tpot(
    elapsed_s: float,
    num_gaps: int,
    bound_s: float,
    *,
    tolerance_s: float = DELIVERY_TOLERANCE_S,
) -> bool:
    """Say whether so many tokens after the first took `bound_s` each, and epsilon in all."""
    return elapsed_s <= num_gaps * bound_s + tolerance_s
