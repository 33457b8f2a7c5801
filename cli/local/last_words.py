"""What a process said before it ended, without what no reader needs."""

import re
from collections.abc import Sequence
from itertools import takewhile

NUM_LINES = 12
NUM_SEARCHED_LINES = 400
MAX_CONTINUED_LINES = 4
# What vLLM puts before a line: "(EngineCore pid=7) ERROR 11-22 22:27:05 [core.py:1] ".
PREFIX = re.compile(r"^(?:\([^)]*\)\s*)?(?:ERROR [^\]]*\]\s?)?")
EXCEPTION = re.compile(PREFIX.pattern + r"((?:\w+\.)*\w+(?:Error|Exception)): (.*)")
# vLLM's front process ends with a sentence that only points at the engine's.
POINTS_ELSEWHERE = "See root cause above"
TRACEBACK = "Traceback (most recent call last)"


def last_words(lines: Sequence[str]) -> list[str]:
    """Return the cause of a failure, or where there is no traceback the last lines."""
    ends = [line for line in lines[-NUM_SEARCHED_LINES:] if line.strip()]
    if any(TRACEBACK in line for line in ends):
        for place, line in enumerate(ends):
            match = EXCEPTION.match(line)
            # The first exception is the cause; those after it say that it has happened.
            if match and POINTS_ELSEWHERE not in match[2]:
                return [f"{match[1]}: {match[2]}", *_continued(ends[place + 1 :])]
    return ends[-NUM_LINES:]


def _continued(lines: Sequence[str]) -> list[str]:
    """Return the indented lines that an exception's text goes on with."""
    rest = [PREFIX.sub("", line) for line in lines[:MAX_CONTINUED_LINES]]
    return list(takewhile(lambda line: line.startswith("  "), rest))
