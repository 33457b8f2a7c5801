"""How many of a thing there are per second, of late."""


class RecentRate:
    """What was measured `half_life_s` ago, of the time that is taken in, counts half."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._time_s = 0.0  # old time counts less
        self._number = 0.0  # in it

    def passed(self, time_s: float) -> None:
        """Take in some time; what `came` in it is still to be said."""
        kept = 0.5 ** (time_s / self._half_life_s)
        self._time_s = kept * self._time_s + time_s
        self._number *= kept

    def came(self, number: float) -> None:
        """Take in so many things, in the time that has passed last."""
        self._number += number

    @property
    def per_s(self) -> float:
        """Return the rate; 0: no time has passed."""
        return self._number / self._time_s if self._time_s else 0.0
