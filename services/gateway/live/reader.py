"""How one reader keeps up: what is due to it and not yet taken, and since when it takes nothing."""

from collections.abc import Callable


class Reader:
    """Has generation held while the reader lags too far behind.

    Tokens that are held back for their pace are not due, and do not count.
    """

    def __init__(self, *, max_undelivered_tokens: int, on_hold: Callable[[bool], None]) -> None:
        """Call `on_hold` with True when so many tokens (>= 1) wait, with False when fewer do."""
        self._max_undelivered_tokens = max_undelivered_tokens
        self._on_hold = on_hold
        self._num_undelivered = 0  # due, and not taken
        self.is_held = False  # generation is
        self._waiting_since_s: float | None = None  # for the reader to take what was handed to it

    def due(self, num_tokens: int) -> None:
        """Note that so many more tokens are the reader's to take."""
        self._num_undelivered += num_tokens
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
        """Have nothing held any more, and forget whom to call. May be called twice."""
        self._on_hold = _nobody

    def _hold_or_let_go(self) -> None:
        lags = self._num_undelivered >= self._max_undelivered_tokens
        if lags != self.is_held:
            self.is_held = lags
            self._on_hold(lags)


def _nobody(hold: bool) -> None:
    """Do nothing."""
