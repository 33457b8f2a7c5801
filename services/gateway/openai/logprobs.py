"""Log probabilities in the two shapes of the OpenAI API."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from services.generation.logprobs import Logprob, TokenLogprobs


def chat_logprobs(tokens: Sequence[TokenLogprobs], *, by_id: bool = False) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice; `by_id` with each token's id in place of its text."""
    return {
        "content": [
            _entry(token.chosen, by_id)
            | {"top_logprobs": [_entry(likely, by_id) for likely in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokens: Sequence[TokenLogprobs], *, first_offset: int = 0, by_id: bool = False
) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice; `by_id` with each token's id in place of its
    text.

    `text_offset` counts characters from the beginning of the choice's text, `first_offset` before
    these tokens. The chosen token is among the likeliest, so that there may be one more of them.
    A prompt's first token has no probability.
    """
    offsets, offset = [], first_offset
    for token in tokens:
        offsets.append(offset)
        offset += len(token.chosen.token)
    return {
        "text_offset": offsets,
        "token_logprobs": [token.chosen.logprob for token in tokens],
        "tokens": [_id_name(t.chosen) if by_id else t.chosen.token for t in tokens],
        "top_logprobs": [_likeliest(token, by_id) for token in tokens],
    }


def _likeliest(token: TokenLogprobs, by_id: bool) -> dict[str, float | None] | None:
    """Return probabilities by text; by id where tokens have the same one, or none: bytes that make
    no character.
    """
    if token.chosen.logprob is None:
        return None
    likely = {one.id: one for one in (*token.top, token.chosen)}.values()
    num_with = Counter(one.token for one in likely)
    return {
        one.token if one.token and num_with[one.token] == 1 and not by_id else _id_name(one): (
            one.logprob
        )
        for one in likely
    }


def _id_name(logprob: Logprob) -> str:
    """Return what vLLM's server calls a token that is named by its id."""
    return f"token_id:{logprob.id}"


def _entry(logprob: Logprob, by_id: bool) -> dict[str, Any]:
    return {
        "token": _id_name(logprob) if by_id else logprob.token,
        "logprob": logprob.logprob,
        "bytes": list(logprob.token.encode()),
    }
