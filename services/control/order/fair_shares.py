"""What fairness ids have held of the KV pool of late, by which they come next.

Least attained service, in token-seconds of KV, with a half-life: what an id attained counts half
after one, a quarter after two. So an id that was away has an advantage of what others attained of
late, and of no more. Instants are seconds of one clock.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

AHEAD_FRAC = 0.1  # of a half-life, that what an id holds counts for before it has passed
FORGOTTEN_AFTER = 10.0  # half-lives without a request: a thousandth is left
MAX_IDLE_IDS = 65_536  # that are remembered; of more the one that has been idle longest goes


@dataclass(slots=True, eq=False)
class _Share:
    attained: float = 0.0  # token-seconds, as of `until_s`
    until_s: float = -math.inf
    held: float = 0.0  # tokens, since then
    served_s: float = 0.0  # when it last held something, since it has requests


class FairShares:
    """The book of one engine. A step costs time by the ids that have requests."""

    def __init__(self, half_life_s: float) -> None:
        """`half_life_s` > 0."""
        self.half_life_s = half_life_s
        self.ahead_s = AHEAD_FRAC * half_life_s
        self._mean_life_s = half_life_s / math.log(2.0)
        self._active: dict[str, _Share] = {}  # that have requests
        self._idle: dict[str, _Share] = {}  # the one that has been idle longest first
        self._untold = defaultdict[str, float](float)

    def advance(self, now_s: float) -> None:
        """Let ids attain what they have held until now."""
        for name, share in self._active.items():
            self._advance(name, share, now_s)

    def _advance(self, name: str, share: _Share, now_s: float) -> None:
        left = self._left(now_s - share.until_s)
        if share.held:
            self._untold[name] += share.held * (now_s - share.until_s)
            share.served_s = now_s
        share.attained = share.attained * left + share.held * self._mean_life_s * (1.0 - left)
        share.until_s = now_s

    def _left(self, age_s: float) -> float:
        return math.pow(0.5, age_s / self.half_life_s)

    def suspend(self, now_s: float) -> None:
        """Let ids hold nothing until `hold` is told what."""
        self.advance(now_s)
        for share in self._active.values():
            share.held = 0.0

    def hold(self, held: Mapping[str, float], now_s: float) -> None:
        """Take in which ids have requests, and how many tokens of KV in the pool these hold from
        now on.
        """
        self.advance(now_s)
        for name in [name for name in self._active if name not in held]:
            self._idle[name] = self._active.pop(name)
        for name, num_tokens in held.items():
            if name not in self._active:
                self._begin(name, now_s)
            self._active[name].held = num_tokens
        self._forget(now_s)

    def _begin(self, name: str, now_s: float) -> None:
        """Take in that an id has requests again, or for the first time."""
        share = self._idle.pop(name) if name in self._idle else _Share()
        share.held, share.served_s = 0.0, now_s
        self._advance(name, share, now_s)
        self._active[name] = share

    def _forget(self, now_s: float) -> None:
        oldest_s = now_s - FORGOTTEN_AFTER * self.half_life_s
        while self._idle:
            name = next(iter(self._idle))
            if self._idle[name].until_s > oldest_s and len(self._idle) <= MAX_IDLE_IDS:
                break
            del self._idle[name]

    def standing(self, name: str) -> float:
        """Return what an id with requests has attained, and what it holds for `ahead_s`.

        Without the latter an id that is behind would get all room until its requests have brought
        it as far ahead. One that has been passed over for a half-life is below all others, the
        longer the further: no id waits for ever, however many new ones come.
        """
        share = self._active[name]
        passed_over_s = share.until_s - share.served_s
        if passed_over_s > self.half_life_s and not share.held:
            return -passed_over_s
        return share.attained + share.held * self.ahead_s

    @property
    def jain_index(self) -> float:
        """Return how evenly ids with requests have attained."""
        return jain_index([share.attained for share in self._active.values()])

    def take(self) -> Mapping[str, float]:
        """Return the token-seconds that ids have attained since the last call, by id."""
        taken, self._untold = self._untold, defaultdict(float)
        return taken


def jain_index(attained: Collection[float]) -> float:
    """Return how evenly it is shared, in (0, 1]: 1 where all have the same, 1 / their number where
    one has all (Jain, Chiu, Hawe, 1984).
    """
    squares = len(attained) * sum(one * one for one in attained)
    return sum(attained) ** 2 / squares if squares else 1.0
