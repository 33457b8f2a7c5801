"""The bars of `bench.prefix`, on figures that can be followed by hand."""

import pytest

from bench.document import Row
from bench.prefix.bars import OURS, STOCK, UNCACHED, of_agents, verdicts
from bench.tool_agents import ToolAgents


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


def test_the_bars_of_agents_are_held_against_stock() -> None:
    stock = {
        "engine": STOCK, "next_ttft_p50_s": 1.0, "next_ttft_p95_s": 4.0, "tokens_per_s": 100.0,
        "recomputed_tokens": 1_000,
    }  # fmt: skip
    just = {
        "engine": OURS, "next_ttft_p50_s": 0.3, "next_ttft_p95_s": 2.0, "tokens_per_s": 120.0,
        "recomputed_tokens": 50,
    }  # fmt: skip
    behind = {
        "engine": OURS, "next_ttft_p50_s": 0.31, "next_ttft_p95_s": 2.1, "tokens_per_s": 119.0,
        "recomputed_tokens": 51,
    }  # fmt: skip

    assert [line.split(": ")[-1] for line in of_agents([stock, just])] == ["met"] * 4
    assert [line.split(": ")[-1] for line in of_agents([stock, behind])] == ["missed"] * 4
    nothing = of_agents([{**stock, "recomputed_tokens": 0}, {**just, "recomputed_tokens": 0}])
    assert nothing[-1] == "recomputed tokens: 0 for stock vLLM's 0, at most 0.05 x: met"


def test_agents_begin_alike_and_wait_for_their_tools() -> None:
    agents = ToolAgents()
    steps = agents.steps(1)

    assert len(steps) == 24 * 12
    assert agents.third_tokens == 24 * 8_000 // 3
    last = steps[11]
    assert last.num_prompt_tokens + last.num_output_tokens == agents.longest_tokens == 8_000
    assert all(1.0 <= one.wait_s <= 30.0 for one in steps if one.follows)
    first, other = (list(steps[number].block_keys(16)) for number in (0, 12))
    assert first[:125] == other[:125]  # 2,000 tokens
    assert first[125] != other[125]
