"""Log probabilities in the two shapes of the OpenAI API."""

from collections.abc import Sequence
from typing import Any

from services.generation.logprobs import Logprob, TokenLogprobs


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice."""
    return {
        "content": [
            _entry(token.chosen) | {"top_logprobs": [_entry(likely) for likely in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokens: Sequence[TokenLogprobs], *, first_offset: int = 0
) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice.

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
        "tokens": [token.chosen.token for token in tokens],
        "top_logprobs": [_likeliest(token) for token in tokens],
    }


def _likeliest(token: TokenLogprobs) -> dict[str, float | None] | None:
    if token.chosen.logprob is None:
        return None
    return {likely.token: likely.logprob for likely in (*token.top, token.chosen)}


def _entry(logprob: Logprob) -> dict[str, Any]:
    return {
        "token": logprob.token,
        "logprob": logprob.logprob,
        "bytes": list(logprob.token.encode()),
    }
