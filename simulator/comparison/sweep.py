"""Runs the cells of a comparison in parallel, and keeps each as soon as it is finished.

A sweep that was cut off goes on where it was when it is called again with the same cache.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simulator.comparison.cache import CellCache, cell_key
from simulator.comparison.grid import Cell, CellResult, run_alike

Finished = Callable[[Cell, bool], None]  # the cell, and whether the cache had it


def sweep(
    cells: Sequence[Cell],
    *,
    jobs: int = 1,
    cache: CellCache | None = None,
    finished: Finished = lambda cell, cached: None,
) -> list[CellResult]:
    """Return the results in the order of the cells. No figure depends on `jobs` or the cache."""
    found: dict[int, CellResult] = {}
    for number, cell in enumerate(cells):
        result = cache.get(cell) if cache else None
        if result is not None:
            found[number] = result
            finished(cell, True)
    left: dict[str, list[int]] = defaultdict(list)  # by what is run
    for number, cell in enumerate(cells):
        if number not in found:
            left[cell_key(cell.asked)].append(number)
    for numbers, results in _run(cells, list(left.values()), jobs):
        for number, result in zip(numbers, results, strict=True):
            found[number] = result
            if cache:
                cache.put(cells[number], result)
            finished(cells[number], False)
    return [found[number] for number in range(len(cells))]


def _run(
    cells: Sequence[Cell], alike: Sequence[list[int]], jobs: int
) -> Iterator[tuple[list[int], list[CellResult]]]:
    """Yield results as they come, `jobs` runs at a time. `alike`: the cells of each run."""
    runs = [[cells[number] for number in numbers] for numbers in alike]
    if min(jobs, len(runs)) <= 1:
        yield from zip(alike, map(run_alike, runs), strict=True)
        return
    with ProcessPoolExecutor(
        max_workers=min(jobs, len(runs)), mp_context=get_context("spawn")
    ) as pool:
        futures = {
            pool.submit(run_alike, run): numbers for numbers, run in zip(alike, runs, strict=True)
        }
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def progress_bar(num_cells: int, console: Console) -> Iterator[Finished]:
    """Show how far a sweep is, while open; nothing where there is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[cached]} from the cache"),
    )
    num_cached = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("runs", total=num_cells, cached=0)

        def finished(cell: Cell, cached: bool) -> None:
            nonlocal num_cached
            num_cached += cached
            progress.update(task, advance=1, cached=num_cached, description=cell.name)

        yield finished
