"""What the tests of the chart have in common: rendered once per set of values."""

from functools import cache
from typing import Any

import pytest

from lab.chart_tools import has_helm
from tests.charts import EXAMPLES, objects, render


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not has_helm():
        for item in items:
            if "/chart/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="the pinned helm is for Linux on x86-64"))


@cache
def rendered(example: str) -> str:
    return render(values=EXAMPLES[example])


@pytest.fixture(params=sorted(EXAMPLES))
def example(request: pytest.FixtureRequest) -> str:
    """A set of values, by its name."""
    name: str = request.param
    return name


@pytest.fixture
def text(example: str) -> str:
    return rendered(example)


@pytest.fixture
def found(text: str) -> list[dict[str, Any]]:
    """The objects of a set of values."""
    return objects(text)
