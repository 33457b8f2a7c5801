"""The client's own measure of a paced answer."""

import pytest

from cli.client.answer import PacedAnswer, num_late, summary

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
