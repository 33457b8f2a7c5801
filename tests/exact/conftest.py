"""`--draw`: of the product and of failing copies, only the engines that this commit draws."""

from collections.abc import Mapping

import pytest

from lab.engine.step_runner import EngineCase
from tests.exact import failures, product
from tests.exact.cases import STANDING
from tests.exact.draw import SEED_VARIABLE, draw, seed

OPTION = "--draw"
# By the module and the parameter that stands for an engine: those that every commit does not start
# anyway, and how many of them are drawn.
POPULATIONS: dict[tuple[str, str], tuple[Mapping[str, EngineCase], int]] = {
    # But for those whose positions are computed anew: `test_uncached.py` starts two.
    ("product", "runner"): (
        {name: case for name, case in product.CASES.items() if case not in STANDING.values()},
        1,
    ),
    ("product", "case"): (product.BF16_CASES, 1),
    ("failures", "runner"): (failures.CASES, 1),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help=__doc__)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.getoption(OPTION):
        return []
    engines = [name for population in POPULATIONS.values() for name in draw(*population)]
    return [f"drawn: {', '.join(engines)} ({SEED_VARIABLE}={seed()} draws them again)"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption(OPTION):
        keep = [item for item in items if _is_drawn(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in keep])
        items[:] = keep


def _is_drawn(item: pytest.Item) -> bool:
    """Say whether a test needs no engine, or one that is drawn."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    for (module, parameter), (cases, count) in POPULATIONS.items():
        if item.path.stem == module and parameter in params:
            return params[parameter] in [cases[name] for name in draw(cases, count)]
    return True
