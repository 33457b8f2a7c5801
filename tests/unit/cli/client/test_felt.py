"""What readers felt: tables computed by hand."""

from dataclasses import replace
from typing import Any

import pytest

from cli.client.felt import (
    ALL,
    UNPACED,
    Felt,
    Heard,
    felt,
    felt_by_rate,
    num_untimed,
    percentile,
)
from cli.client.felt_view import after_thoughts, felt_table
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel

TEN_PER_S = ServiceLevel(consumption_rate_tps=10.0, pace_tail=True)


def make_heard(**overrides: Any) -> Heard:
    fields: dict[str, Any] = {
        "level": TEN_PER_S,
        "sent_s": 0.0,
        "arrived_s": (1.0, 1.1, 1.2),
        "num_tokens": 3,
    }
    return Heard(**{**fields, **overrides})


@pytest.mark.parametrize(
    ("values", "frac", "expected"),
    [
        ([3.0], 0.99, 3.0),
        ([4.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.5),
        ([0.0, 10.0], 0.95, 9.5),
        ([1.0, 2.0], 1.0, 2.0),
        ([1.0, 2.0], 0.0, 1.0),
    ],
)
def test_percentiles_are_interpolated(values: list[float], frac: float, expected: float) -> None:
    assert percentile(values, frac) == pytest.approx(expected)


def test_a_row_by_hand() -> None:
    level = replace(TEN_PER_S, slo_ttft_s=1.0)
    row = felt(
        "10",
        [
            # TTFT 1.0, which is within; nothing late in 2 gaps; 0.2 to read.
            make_heard(level=level),
            # TTFT 2.0; of 4 gaps one is late by 0.3; 0.4 to read, delivered in 0.7.
            make_heard(level=level, sent_s=3.0, arrived_s=(5.0, 5.1, 5.5, 5.6, 5.7)),
        ],
    )

    assert row == Felt(
        readers="10",
        num_requests=2,
        ttft_p50_s=pytest.approx(1.5),
        ttft_p95_s=pytest.approx(1.95),
        ttft_p99_s=pytest.approx(1.99),
        num_thoughts=0,
        ttfat_p50_s=pytest.approx(1.5),
        ttfat_p95_s=pytest.approx(1.95),
        ttft_in_time_frac=0.5,
        in_time_frac=pytest.approx(5 / 6),
        num_stalls=1,
        waited_p50_s=pytest.approx(0.15),
        waited_p95_s=pytest.approx(0.285),
        waited_max_s=pytest.approx(0.3),
        rebuffering_frac=pytest.approx(0.3 / 0.6),
        tokens_per_s=pytest.approx(6 / 0.9),
    )


def test_thoughts_are_in_no_figure_but_the_first_token() -> None:
    level = replace(TEN_PER_S, slo_ttft_s=1.0)
    row = felt(
        "10",
        [
            # Thinks from 0.5 on; the answer begins at 2.0, beyond its SLO, and is in time.
            make_heard(level=level, arrived_s=(0.5, 0.9, 2.0, 2.1, 2.2), num_thoughts=2),
            make_heard(level=level, arrived_s=(0.5, 0.9), num_thoughts=2),  # and no more
        ],
    )

    assert (row.ttft_p50_s, row.num_thoughts) == (0.5, 4)
    assert (row.ttfat_p50_s, row.ttfat_p95_s) == (2.0, 2.0)
    assert (row.ttft_in_time_frac, row.in_time_frac, row.num_stalls) == (0.0, 1.0, 0)
    assert row.tokens_per_s == pytest.approx(10.0)
    assert after_thoughts(row) == "TTFT of the answer, after 4 thoughts: p50 2000, p95 2000 ms."


def test_without_a_promise_nothing_is_late() -> None:
    row = felt(UNPACED, [make_heard(level=NO_SERVICE_LEVEL)])

    assert (row.in_time_frac, row.num_stalls, row.rebuffering_frac) == (None, None, None)
    assert row.ttft_in_time_frac is None
    assert row.tokens_per_s == pytest.approx(10.0)


def test_a_rate_is_the_promise_before_the_slos() -> None:
    # At 10 tokens/s 0.15 s is late, at a TBT SLO of 0.2 s it is not.
    arrived_s = (0.0, 0.15)

    def late(**level: float) -> int | None:
        heard = make_heard(level=ServiceLevel(**level), arrived_s=arrived_s)
        return felt("", [heard]).num_stalls

    assert late(consumption_rate_tps=10.0, slo_tbt_s=0.2) == 1
    assert late(slo_tbt_s=0.2, slo_tpot_s=0.1) == 0
    assert late(slo_tpot_s=0.1) == 1


def test_answers_of_one_token_have_no_gaps_to_judge() -> None:
    row = felt("10", [make_heard(arrived_s=(1.0,), num_tokens=1)])

    assert (row.in_time_frac, row.rebuffering_frac, row.tokens_per_s) == (None, None, None)
    assert row.num_stalls == 0


def test_there_is_a_row_for_each_rate_and_one_for_all() -> None:
    fast = ServiceLevel(consumption_rate_tps=20.0)
    heard = [
        make_heard(level=NO_SERVICE_LEVEL),
        make_heard(level=fast),
        make_heard(),
        make_heard(),
    ]

    rows = felt_by_rate(heard)

    assert [(row.readers, row.num_requests) for row in rows] == [
        ("10", 2), ("20", 1), (UNPACED, 1), (ALL, 4),
    ]  # fmt: skip
    assert [row.readers for row in felt_by_rate(heard[2:])] == ["10"]
    assert felt_by_rate([]) == []


def test_tokens_that_no_event_told_of_are_counted() -> None:
    assert num_untimed([make_heard(num_tokens=5), make_heard(), make_heard(num_tokens=2)]) == 2


def test_the_table_has_a_line_for_each_row_and_fits_a_terminal() -> None:
    heard = [make_heard(), make_heard(level=NO_SERVICE_LEVEL)]

    table = felt_table(felt_by_rate(heard), ["a note"])

    lines = table.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [" ".join(line.split()) for line in lines[3:6]] == [
        "10 1 1000 1000 1000 - 100.0% 0 0.00 0.00 0.00 0.0% 10.0",
        "unpaced 1 1000 1000 1000 - - - - - - - 10.0",
        "all 2 1000 1000 1000 - 100.0% 0 0.00 0.00 0.00 0.0% 10.0",
    ]
    assert "a note" in lines
    assert "5 ms" in table
