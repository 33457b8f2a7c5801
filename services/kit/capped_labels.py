"""Values of a metric's label that clients choose: so many at most."""

OTHER = "other"


class CappedLabels:
    """The first values have labels of their own, all later ones are `OTHER`."""

    def __init__(self, most: int) -> None:
        """`most`: labels beside `OTHER`, >= 0."""
        self._most = most
        self._known: set[str] = set()

    def label(self, value: str) -> str:
        """Return a value's label."""
        if len(self._known) < self._most:
            self._known.add(value)
        return value if value in self._known else OTHER
