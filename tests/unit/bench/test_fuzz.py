"""What a fuzzing campaign tells of itself."""

from typing import Any

from bench.fuzz.campaign import BENCHMARK, MAX_ROWS, Tally, whole_of


def make_row(minute: int, num_inputs: int, mebibytes: int, **paced: float) -> dict[str, Any]:
    return {
        "elapsed_s": 60.0 * minute,
        "num_inputs": num_inputs,
        "rss_bytes": mebibytes << 20,
        "paced": {"num_streams": 2.0, **paced},
    }


def test_a_whole_campaign_is_told_by_the_rows_in_which_inputs_were_sent() -> None:
    rows = [
        make_row(1, 0, 80, p99_s=9.0),
        make_row(2, 0, 90, p99_s=9.0),
        make_row(3, 60, 100, p99_s=0.2),
        make_row(4, 240, 95, p99_s=0.1),
        make_row(5, 240, 92, p99_s=9.0),
    ]

    whole = whole_of(rows)

    assert (whole["num_inputs"], whole["inputs_per_s"]) == (240, 2.0)  # of two minutes
    assert whole["rss_bytes_before"] == 90 << 20
    assert whole["rss_bytes_most"] == 100 << 20
    assert whole["rss_bytes_after"] == 92 << 20
    assert (whole["num_paced_streams"], whole["worst_paced_p99_s"]) == (10.0, 0.2)


def test_a_campaign_that_sent_nothing_has_figures_too() -> None:
    whole = whole_of([make_row(1, 0, 80), make_row(2, 0, 90)])

    assert (whole["num_inputs"], whole["inputs_per_s"], whole["worst_paced_p99_s"]) == (0, 0.0, 0.0)


def test_the_table_of_hours_is_short_and_ends_with_the_last_row() -> None:
    rows = [make_row(minute, minute, 90) for minute in range(361)]

    _, *lines = BENCHMARK.table(rows)

    assert len(lines) <= MAX_ROWS + 1
    assert (lines[0][0], lines[-1][0]) == ("0.0", "360.0")


def test_however_much_fails_little_is_kept() -> None:
    tally = Tally()
    for _ in range(5_000):
        tally.fail("x" * 100_000)

    assert tally.num_failures == 5_000
    assert sum(map(len, tally.failures)) <= 40_000
