"""Predicted lengths of answers."""

from services.control.measures.answer_lengths import AnswerLengths


def after(*lengths: int) -> AnswerLengths:
    lengths_so_far = AnswerLengths()
    for length in lengths:
        lengths_so_far.ended(length)
    return lengths_so_far


def test_the_range_spans_most_answers_that_were_longer() -> None:
    lengths = after(*range(1, 101))

    assert lengths.predict(num_output_tokens=0, max_tokens=1_000) == (10, 90)
    assert lengths.predict(num_output_tokens=80, max_tokens=1_000) == (82, 98)


def test_an_answer_longer_than_all_before_is_not_predicted() -> None:
    assert after(10, 20).predict(num_output_tokens=20, max_tokens=100) is None
    assert after().predict(num_output_tokens=0, max_tokens=100) is None


def test_no_answer_is_longer_than_it_may_be() -> None:
    assert after(50, 60).predict(num_output_tokens=5, max_tokens=40) == (40, 40)
