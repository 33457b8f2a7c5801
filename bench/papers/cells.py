"""What the papers' figures are made of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lab.policies.presets import full_name
from simulator.comparison.grid import Cell, CellResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One cell and where it stands on its figure's x axis."""

    x: float
    cell: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is simulated."""

    num_requests: int
    num_seeds: int
    quick: bool = False  # fewer points as well


Figures = Mapping[str, list[Point]]
Simulated: TypeAlias = tuple[Point, CellResult]
Found = Mapping[str, Sequence[Simulated]]


def under(policy: str, cell: Cell) -> Cell:
    """Return the cell under a policy, which tables call by its short name.

    vLLM's prefix cache is off, as in the papers.
    """
    caches = cell.prefix_caching and policy != "vllm"
    return replace(cell, policy=full_name(policy), label=policy, prefix_caching=caches)


def with_seeds(points: Iterable[Point], size: Size) -> list[Point]:
    """Return every point once per seed."""
    given = list(points)
    return [
        replace(point, cell=replace(point.cell, seed=seed))
        for seed in range(size.num_seeds)
        for point in given
    ]
