"""Text in a made-up language: the same bytes on every machine and Python version."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

ONSETS = ("", *"bcdfghjklmnprstvwyz", "br", "ch", "fr", "pl", "pr", "sh", "st", "th", "tr", "wh")
VOWELS = (*"aeiou", "ai", "ea", "ee", "ie", "ou")
CODAS = ("", "", "", *"dlmnrst", "ck", "ll", "nd", "ng", "nt", "ss", "st", "tion")
NUM_WORDS = 4_000
NUM_PARAGRAPHS = 600
ENDS = ("?", "!", ":", ";", *(".",) * 6)


class Draws:
    """Draws of SHAKE-256's output, which FIPS 202 defines to the bit."""

    def __init__(self, seed: str, num_draws: int) -> None:
        self._bytes = hashlib.shake_256(seed.encode()).digest(4 * num_draws)
        self._place = 0

    def below(self, limit: int) -> int:
        """Return an integer in [0, limit). Raises IndexError after `num_draws`."""
        drawn = self._bytes[self._place : self._place + 4]
        if not drawn:
            raise IndexError("no draws are left")
        self._place += 4
        return int.from_bytes(drawn, "little") % limit

    def one_of(self, choices: tuple[str, ...]) -> str:
        return choices[self.below(len(choices))]


def paragraphs(seed: str) -> Iterator[str]:
    """Yield paragraphs of sentences; short words are the frequent ones, by Zipf's law."""
    draws = Draws(seed, 200 * NUM_PARAGRAPHS + 20 * NUM_WORDS)
    words = sorted((_word(draws) for _ in range(NUM_WORDS)), key=len)
    bounds = list(accumulate(1_000_000 // rank for rank in range(1, NUM_WORDS + 1)))
    for _ in range(NUM_PARAGRAPHS):
        sentences = [_sentence(draws, words, bounds) for _ in range(2 + draws.below(5))]
        yield " ".join(sentences) + "\n\n"


def _word(draws: Draws) -> str:
    syllables = 1 + draws.below(3)
    return "".join(
        draws.one_of(ONSETS) + draws.one_of(VOWELS) + draws.one_of(CODAS) for _ in range(syllables)
    )


def _sentence(draws: Draws, words: list[str], bounds: list[int]) -> str:
    said = [words[bisect_right(bounds, draws.below(bounds[-1]))] for _ in range(4 + draws.below(9))]
    said[0] = said[0].capitalize()
    decoration = draws.below(8)
    if decoration == 0:
        said[1] = f'"{said[1]}"'
    elif decoration == 1:
        said[2] = str(draws.below(10_000))
    elif decoration < 5:
        said[1] += ","
    return " ".join(said) + draws.one_of(ENDS)
