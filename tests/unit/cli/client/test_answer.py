"""The client's own measure of a paced answer."""

from typing import Any

import pytest

from cli.client.answer import Arrivals, PacedAnswer, num_late, summary

INTERVAL_S = 0.1


@pytest.mark.parametrize(
    ("arrived_s", "expected"),
    [
        pytest.param([5.0], 0, id="one-token-is-never-late"),
        pytest.param([0.0, 0.1, 0.2, 0.3], 0, id="on-time"),
        pytest.param([0.0, 0.104, 0.204], 0, id="within-the-tolerance-of-5-ms"),
        pytest.param([0.0, 0.106, 0.2], 1, id="beyond-the-tolerance"),
        # 0.5 is late, and the turns after it are 0.6 and 0.7.
        pytest.param([0.0, 0.1, 0.5, 0.6, 0.7], 1, id="a-gap-counts-once"),
        pytest.param([0.0, 0.01, 0.02, 0.03], 0, id="early-is-not-late"),
    ],
)
def test_late_tokens_by_hand(arrived_s, expected) -> None:
    assert num_late(arrived_s, INTERVAL_S) == expected


def test_the_summary_states_what_the_reader_got() -> None:
    answer = PacedAnswer(
        text="abc", num_prompt_tokens=9, num_tokens=3, sent_s=1.0, arrived_s=(1.5, 1.6, 1.7)
    )

    text = summary(answer, rate_tps=10)

    assert "500 ms" in text
    assert "10.0 tokens/s" in text
    assert "0 of 3" in text


def test_an_answer_of_one_token_has_no_gaps() -> None:
    answer = PacedAnswer(text="a", num_prompt_tokens=9, num_tokens=1, sent_s=1.0, arrived_s=(1.5,))

    assert "gaps" not in summary(answer, rate_tps=10)


THOUGHT = {"delta": {"reasoning": "hm", "reasoning_content": "hm"}}
TEXT = {"delta": {"content": "ab"}}
CALL = {"delta": {"tool_calls": [{"index": 0}]}}
NO_TEXT = {"delta": {"content": ""}, "logprobs": {"content": [{}]}}
TWO = {"delta": {"reasoning": "hm"}, "logprobs": {"content": [{}, {}]}}
ROLE = {"delta": {"role": "assistant", "content": ""}}


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        pytest.param([ROLE, TEXT, TEXT], (2, 0), id="no-thoughts"),
        pytest.param([NO_TEXT, TEXT], (2, 0), id="a-first-token-without-text"),
        # What opens and closes thoughts has no text of its own.
        pytest.param([NO_TEXT, THOUGHT, NO_TEXT, TEXT, NO_TEXT], (5, 3), id="thoughts-first"),
        pytest.param([TWO, CALL], (3, 2), id="a-call-after-thoughts"),
        pytest.param([THOUGHT, THOUGHT], (2, 2), id="nothing-but-thoughts"),
        pytest.param([{"text": "ab"}, {"text": "c"}], (2, 0), id="a-completion"),
    ],
)
def test_the_answer_begins_behind_its_thoughts(choices: list[Any], expected: Any) -> None:
    arrivals = Arrivals()
    for choice in choices:
        arrivals.take(choice, 0.0)

    assert (len(arrivals.at_s), arrivals.num_thoughts) == expected


def test_thoughts_have_no_pace() -> None:
    answer = PacedAnswer(
        text="abc",
        num_prompt_tokens=9,
        num_tokens=6,
        sent_s=1.0,
        arrived_s=(1.5, 1.501, 3.5, 4.0, 4.1, 4.2),
        num_thoughts=3,
    )

    assert (answer.ttft_s, answer.ttfat_s) == (0.5, 3.0)
    assert answer.gaps_s == pytest.approx([0.1, 0.1])
    assert "10.0 tokens/s" in summary(answer, rate_tps=10)
    assert "0 of 3" in summary(answer, rate_tps=10)
