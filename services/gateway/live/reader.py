"""How one reader keeps up: what is due to it and not yet taken, and since when it takes nothing."""

from collections.abc import Callable
from dataclasses import dataclass

TOKEN_BYTES = 256  # of memory that a token takes while it waits, about
LOGPROB_BYTES = 160  # and each of its probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLimits:
    """How far a reader may lag."""

    max_undelivered_tokens: int  # due and not taken, from which generation is held, >= 1
    max_deposit_bytes: int  # of tokens that are not due yet, from which it is held, >= 1
    max_pace_tail_s: float  # after generation, for which the rest keeps its pace, >= 0
    # Ids of an answer that are kept, for another executor to go on with it, >= 0.
    max_kept_tokens: int = 0

    def max_deposited_tokens(self, num_logprobs: int | None) -> int:
        """Return how many tokens with so many likely ones beside each (None: no probabilities at
        all) may wait for their time.
        """
        return max(1, self.max_deposit_bytes // token_bytes(num_logprobs))


def token_bytes(num_logprobs: int | None) -> int:
    """Return about how much memory a token takes with so many likely ones beside it."""
    return TOKEN_BYTES + (0 if num_logprobs is None else (1 + num_logprobs) * LOGPROB_BYTES)


class Reader:
    """Has generation held while the reader lags too far behind, or too much waits for its time."""

    def __init__(
        self,
        *,
        max_undelivered_tokens: int,
        max_deposited_tokens: int,
        on_hold: Callable[[bool], None],
    ) -> None:
        """Call `on_hold` with True when so many tokens (>= 1) wait for the reader, or for their
        time, with False when fewer do for the one, and half as many for the other.
        """
        self._max_undelivered_tokens = max_undelivered_tokens
        self._max_deposited_tokens = max_deposited_tokens
        self._on_hold = on_hold
        self._num_deposited = 0  # not due yet
        self._num_undelivered = 0  # due, and not taken
        self.is_held = False  # generation is
        self._waiting_since_s: float | None = None  # for the reader to take what was handed to it

    def due(self, num_tokens: int) -> None:
        """Note that so many more tokens are the reader's to take."""
        self._num_undelivered += num_tokens
        self._hold_or_let_go()

    def deposited(self, num_tokens: int) -> None:
        """Note how many tokens are not due yet."""
        self._num_deposited = num_tokens
        if self.is_held or num_tokens >= self._max_deposited_tokens:
            self._hold_or_let_go()

    def handed(self, now_s: float) -> None:
        """Note that a batch is being written; until `took` the reader is waited for."""
        self._waiting_since_s = now_s

    def took(self, num_tokens: int) -> None:
        """Note that a batch of so many tokens was written."""
        self._waiting_since_s = None
        self._num_undelivered -= num_tokens
        self._hold_or_let_go()

    def stopped_for_s(self, now_s: float) -> float:
        """Return since when the reader has taken nothing of what was handed to it; else 0."""
        return 0.0 if self._waiting_since_s is None else now_s - self._waiting_since_s

    def close(self) -> None:
        """Have nothing held any more, and forget what to call. May be called twice."""
        self._on_hold = _nobody

    def _hold_or_let_go(self) -> None:
        most = self._max_deposited_tokens
        lags = (
            self._num_undelivered >= self._max_undelivered_tokens
            or self._num_deposited >= most
            or (self.is_held and self._num_deposited > most // 2)
        )
        if lags != self.is_held:
            self.is_held = lags
            self._on_hold(lags)


def _nobody(hold: bool) -> None:
    """Do nothing."""
