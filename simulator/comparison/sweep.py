"""Runs the cells of a comparison in parallel, and keeps each as soon as it is finished.

A sweep that was cut off goes on where it was when it is called again with the same cache.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simulator.comparison.cache import CellCache
from simulator.comparison.grid import Cell, CellResult

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
    left = [number for number in range(len(cells)) if number not in found]
    for number, result in _run([(number, cells[number]) for number in left], jobs):
        found[number] = result
        if cache:
            cache.put(cells[number], result)
        finished(cells[number], False)
    return [found[number] for number in range(len(cells))]


def _run(cells: Sequence[tuple[int, Cell]], jobs: int) -> Iterator[tuple[int, CellResult]]:
    """Yield results as they come, `jobs` at a time."""
    if min(jobs, len(cells)) <= 1:
        for number, cell in cells:
            yield number, cell.run()
        return
    with ProcessPoolExecutor(
        max_workers=min(jobs, len(cells)), mp_context=get_context("spawn")
    ) as pool:
        futures = {pool.submit(Cell.run, cell): number for number, cell in cells}
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
