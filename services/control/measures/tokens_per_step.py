"""How many tokens a decode step brings a request: more than one where drafts are accepted."""

REQUEST_WEIGHT = 1.0 / 16.0  # of the newest step in a request's mean
BATCH_WEIGHT = 1.0 / 256.0  # of the newest step of any request in the mean of all


class TokensPerStep:
    """Moving means, in tokens, >= 1: exactly 1 where nothing drafts."""

    def __init__(self) -> None:
        self.mean = 1.0  # of all requests
        self._num_steps = 0

    def added(self, known: float | None, num_new: int) -> float:
        """Return a request's mean after a step that brought it `num_new` tokens, >= 1.

        `known`: its mean so far; None: it had no decode step yet, and is like the others.
        """
        before = self.mean if known is None else known
        self._num_steps += 1
        weight = max(1.0 / self._num_steps, BATCH_WEIGHT)
        self.mean += weight * (num_new - self.mean)
        return before + REQUEST_WEIGHT * (num_new - before)
