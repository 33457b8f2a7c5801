"""LoRA adapters pass through layer-wise KV: requests with one and without, in the same steps."""

from dataclasses import replace
from pathlib import Path

import pytest

from lab.adapters import save_adapter
from lab.engine.step_runner import Arrival, first_difference, run_case, stock
from lab.engine.workloads import churn, mixed
from lab.models import NUM_LAYERS
from tests.exact.cases import make_case

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
    pytest.mark.nightly,
]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    save_adapter(directory)
    return directory


def test_tokens_with_adapters_are_stock_vllms(adapter: Path) -> None:
    case = make_case(takes_adapters=True)
    plain = mixed(NUM_LAYERS)
    workload: list[Arrival] = [
        replace(arrival, adapter=adapter) if number % 2 else arrival
        for number, arrival in enumerate(plain)
    ]

    expected = run_case(stock(case), workload)
    without = run_case(stock(case), plain)
    actual = run_case(case, workload, hook=churn(1))

    assert first_difference(expected, actual) == {}
    adapted = {arrival.request_id for arrival in workload if arrival.adapter is not None}
    assert first_difference(without, expected).keys() == adapted  # and nobody else is moved
    assert actual.num_offloads >= 20
    assert actual.sums["num_loads"] >= 1_000
