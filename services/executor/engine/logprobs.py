"""vLLM's log probabilities of one place, ordered and made fit for JSON."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.generation.logprobs import Logprob, TokenLogprobs

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has no number for


class VllmLogprob(Protocol):
    """The part of vLLM's `Logprob` that is read here."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class PromptOutput(Protocol):
    """The part of vLLM's `RequestOutput` that says how likely the prompt was."""

    prompt_token_ids: Sequence[int] | None
    prompt_logprobs: Sequence[Mapping[int, VllmLogprob] | None] | None  # with the first token


def token_logprobs(
    chosen_id: int, place: Mapping[int, VllmLogprob], num_logprobs: int
) -> TokenLogprobs:
    """Return how likely `chosen_id` was, and the `num_logprobs` >= 0 likeliest tokens of its place.

    vLLM gives the chosen token beside the likeliest ones, whether or not it is one of them.
    """
    likeliest = sorted(place, key=lambda id: -place[id].logprob)[:num_logprobs]
    top = tuple(_logprob(id, place[id]) for id in likeliest)
    return TokenLogprobs(_logprob(chosen_id, place[chosen_id]), top)


def prompt_logprobs(
    output: PromptOutput, num_logprobs: int, first_token: str
) -> tuple[TokenLogprobs, ...]:
    """Return one entry per prompt token, or none if vLLM reports nothing of the prompt.

    The first one follows nothing and has no probability; vLLM leaves out its text, `first_token`.
    """
    if not output.prompt_logprobs:
        return ()
    assert output.prompt_token_ids is not None
    return tuple(
        TokenLogprobs(Logprob(id, first_token, None))
        if place is None
        else token_logprobs(id, place, num_logprobs)
        for id, place in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    )


def _logprob(id: int, entry: VllmLogprob) -> Logprob:
    return Logprob(id, entry.decoded_token or "", max(entry.logprob, LEAST_LOGPROB))
