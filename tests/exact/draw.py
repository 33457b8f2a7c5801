"""Which engines of the product a commit runs: drawn by its hash, so that days see all of them."""

import os
import random
import subprocess
from collections.abc import Collection
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED_VARIABLE = "EXACT_SEED"


@cache
def seed() -> int:
    """Return `EXACT_SEED` if it is set, else the first 32 bits of the commit's hash.

    Without a commit (an unpacked archive) it is 0.
    """
    given = os.environ.get(SEED_VARIABLE)
    if given:
        return int(given)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return int(head.stdout[:8], 16) if head.returncode == 0 else 0


def draw(names: Collection[str], count: int) -> list[str]:
    """Return `count` of the names, the same ones for the same `seed`."""
    return sorted(random.Random(seed()).sample(sorted(names), count))
