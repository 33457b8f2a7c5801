"""How likely tokens were, as gateway and executor pass it on. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely one token was at its place."""

    id: int  # in the model's vocabulary
    token: str  # its own text; empty for bytes that make no character yet
    logprob: float | None  # natural logarithm, <= 0; None for a prompt's first token


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the token at one place was, and what was likeliest there."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()  # most likely first; may hold `chosen`


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The prompt, given back with the answer: what was asked for of it."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per prompt token, or none
    token_ids: tuple[int, ...] = ()  # all of them, or none

    def __add__(self, next_piece: "EchoedPrompt") -> "EchoedPrompt":
        """Join two pieces of one prompt."""
        return EchoedPrompt(
            self.text + next_piece.text,
            self.logprobs + next_piece.logprobs,
            self.token_ids + next_piece.token_ids,
        )
