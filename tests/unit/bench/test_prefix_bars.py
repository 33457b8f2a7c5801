"""The bars of `bench.prefix`, on figures that can be followed by hand."""

import pytest

from bench.document import Row
from bench.prefix.bars import OURS, STOCK, UNCACHED, verdicts


def rows(ours_s: float, tokens_per_s: float) -> list[Row]:
    """Return figures beside an engine without a cache (500 ms) and stock's (100 ms, 100/s)."""
    return [
        {"engine": OURS, "last_ttft_s": ours_s, "tokens_per_s": tokens_per_s},
        {"engine": UNCACHED, "last_ttft_s": 0.5, "tokens_per_s": 50.0},
        {"engine": STOCK, "last_ttft_s": 0.1, "tokens_per_s": 100.0},
    ]


@pytest.mark.parametrize(
    ("fits", "ours_s", "tokens_per_s", "words"),
    [
        (True, 0.099, 95.5, ["met", "met", "met"]),  # 5 % slower than stock
        (True, 0.104, 94.5, ["missed", "met", "missed"]),  # more than 1/5 of 500 ms
        (True, 0.106, 101.0, ["missed", "missed", "met"]),
        (False, 0.099, 100.5, ["met", "met", "met"]),  # ahead
        (False, 0.101, 99.5, ["missed", "missed", "missed"]),
    ],
)
def test_each_bar_says_what_was_found_and_whether_it_is_met(
    fits: bool, ours_s: float, tokens_per_s: float, words: list[str]
) -> None:
    lines = verdicts(rows(ours_s, tokens_per_s), fits=fits)

    assert [line.rsplit(": ", 1)[1] for line in lines] == words
    assert f"{1e3 * ours_s:.0f} ms" in lines[0]
