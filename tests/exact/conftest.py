"""`--draw`: of the product and of failing copies, only the engines that this commit draws."""

from collections.abc import Mapping

import pytest

from lab.engine.step_runner import EngineCase
from tests.exact import cases, failures, product, uncached
from tests.exact.draw import SEED_VARIABLE, draw, seed

OPTION = "--draw"
Cases = Mapping[str, EngineCase]


def others(population: Cases, standing: Cases) -> Cases:
    """Return those of a population that every commit does not start anyway."""
    return {name: case for name, case in population.items() if case not in standing.values()}


# The module and the parameter that stands for an engine, those to draw from, and how many are.
POPULATIONS: tuple[tuple[str, str, Cases, int], ...] = (
    ("product", "runner", others(product.CASES, cases.STANDING), 1),
    ("product", "runner", others(product.UNCACHED_CASES, uncached.STANDING), 1),
    ("product", "case", product.BF16_CASES, 1),
    ("failures", "runner", failures.CASES, 1),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help=__doc__)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.getoption(OPTION):
        return []
    engines = [name for *_, population, count in POPULATIONS for name in draw(population, count)]
    return [f"drawn: {', '.join(engines)} ({SEED_VARIABLE}={seed()} draws them again)"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption(OPTION):
        keep = [item for item in items if _is_drawn(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in keep])
        items[:] = keep


def _is_drawn(item: pytest.Item) -> bool:
    """Say whether a test needs no engine, or one that is drawn."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    drawn = [
        params[parameter] in [population[name] for name in draw(population, count)]
        for module, parameter, population, count in POPULATIONS
        if item.path.stem == module and parameter in params
    ]
    return not drawn or any(drawn)
