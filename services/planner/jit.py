"""Compilation of the search kernels to machine code, cached on disk beside their source."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile on first call. No fast-math: a replay gives the same bits."""
    return cast(Callable[P, T], numba.njit(cache=True)(function))
