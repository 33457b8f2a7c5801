"""`--draw`: of the product and of failing copies, only the engine that this commit draws."""

from collections.abc import Mapping
from functools import cache

import pytest

from lab.engine.step_runner import EngineCase
from tests.exact import cases, failures, product, uncached
from tests.exact.draw import SEED_VARIABLE, draw, seed

OPTION = "--draw"
Cases = Mapping[str, EngineCase]


def others(population: Cases, standing: Cases) -> Cases:
    """Return those of a population that every commit does not start anyway."""
    return {name: case for name, case in population.items() if case not in standing.values()}


# The module, the parameter that stands for an engine, and those to draw from.
POPULATIONS: tuple[tuple[str, str, Cases], ...] = (
    ("product", "runner", others(product.CASES, cases.STANDING)),
    ("product", "runner", others(product.UNCACHED_CASES, uncached.STANDING)),
    ("product", "case", product.BF16_CASES),
    ("failures", "runner", failures.CASES),
)


@cache
def drawn() -> tuple[str, str]:
    """Return the module and the name of the engine: one of a single rank, which is sooner done."""
    every = [
        f"{module}: {name}"
        for module, _, population in POPULATIONS
        for name, case in population.items()
        if case.num_ranks == 1
    ]
    module, _, name = draw(every, 1)[0].partition(": ")
    return module, name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help=__doc__)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.getoption(OPTION):
        return []
    return [f"drawn: {': '.join(drawn())} ({SEED_VARIABLE}={seed()} draws it again)"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption(OPTION):
        keep = [item for item in items if _is_drawn(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in keep])
        items[:] = keep


def _is_drawn(item: pytest.Item) -> bool:
    """Say whether a test needs no engine, or the one that is drawn."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    drawn_module, name = drawn()
    of_engines = [
        module == drawn_module and params[parameter] == population.get(name)
        for module, parameter, population in POPULATIONS
        if item.path.stem == module and parameter in params
    ]
    return not of_engines or any(of_engines)
