"""Compilation of the search kernels to machine code, cached on disk beside their source.

Numba looks for changes in the file of a function only, not in those of the functions it calls. So
the cache is kept in a folder that is named after the text of all of them.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
T = TypeVar("T")

HERE = Path(__file__).parent
SOURCES = [
    *HERE.glob("kernels/*.py"),
    *(
        HERE.parent / name
        for name in ("solver/instance.py", "solver/library.py", "policy/window.py")
    ),
]


def digest_of(sources: Iterable[Path]) -> str:
    """Return a name for the text of some files."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _cache_folder() -> Path:
    given = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else HERE / "__pycache__"
    return given / f"kernels-{digest_of(SOURCES)}"


numba.config.CACHE_DIR = str(_cache_folder())


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile on first call. No fast-math: a replay gives the same bits."""
    return cast(Callable[P, T], numba.njit(cache=True)(function))
