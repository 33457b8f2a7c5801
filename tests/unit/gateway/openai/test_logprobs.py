"""How probabilities of tokens are written."""

from services.gateway.openai.logprobs import chat_logprobs, completion_logprobs
from services.generation.logprobs import Logprob, TokenLogprobs

SMILE = Logprob(1, "☺", -0.1)
FIRST_BYTE, OTHER_BYTE = Logprob(2, "", -0.5), Logprob(3, "", -1.0)
SAME_TEXT = Logprob(4, "☺", -2.0)


def test_tokens_of_the_same_text_or_none_do_not_hide_one_another() -> None:
    place = TokenLogprobs(
        FIRST_BYTE, (FIRST_BYTE, OTHER_BYTE, SMILE, SAME_TEXT, Logprob(5, "x", -3.0))
    )

    written = completion_logprobs([place])

    assert written["tokens"] == [""]
    assert written["top_logprobs"] == [
        {
            "token_id:2": -0.5,
            "token_id:3": -1.0,
            "token_id:1": -0.1,
            "token_id:4": -2.0,
            "x": -3.0,
        }
    ]


def test_a_chosen_token_that_is_among_the_likeliest_keeps_its_text() -> None:
    written = completion_logprobs([TokenLogprobs(SMILE, (SMILE, FIRST_BYTE))])

    assert written["top_logprobs"] == [{"☺": -0.1, "token_id:2": -0.5}]


def test_tokens_are_named_by_their_ids_where_that_is_asked_for() -> None:
    place = TokenLogprobs(SMILE, (SMILE,))

    completion = completion_logprobs([place, place], by_id=True)
    (entry, _) = chat_logprobs([place, place], by_id=True)["content"]

    assert completion["tokens"] == ["token_id:1", "token_id:1"]
    assert completion["top_logprobs"][0] == {"token_id:1": -0.1}
    assert completion["text_offset"] == [0, 1]  # of the text, not of the names
    assert (entry["token"], entry["bytes"]) == ("token_id:1", list("☺".encode()))
    assert entry["top_logprobs"][0]["token"] == "token_id:1"
