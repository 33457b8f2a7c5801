"""What an engine logs of its run decisions."""

import pytest

from lab.policies.presets import full_name
from services.control.run_log import replay
from services.pacing.types import ServiceLevel
from simulator.comparison.grid import Workload
from simulator.compose import make_engine
from simulator.deployment import Deployment
from simulator.device.hardware import assumptions, device, model
from simulator.engine.planning import PlanningOptions
from simulator.engine.simulation import simulate
from simulator.workload import constant_length

# A pool of eight requests at their end.
SMALL = Deployment(
    model=model("llama-2-13b"),
    device=device("a100"),
    assumptions=assumptions(),
    layers_per_group=40,
    pool_tokens=4_000,
)


@pytest.mark.parametrize("policy", ["evenflow", full_name("andes")])
def test_a_runs_decisions_are_all_in_its_log_and_are_made_again(policy: str, tmp_path) -> None:
    path = tmp_path / "decisions.jsonl"
    workload = Workload(lengths=(constant_length(400), constant_length(60)), num_requests=16)
    level = ServiceLevel(consumption_rate_tps=10.0)
    options = PlanningOptions(policy=policy, run_log=str(path))
    engine = make_engine(SMALL.shape(), SMALL.machine(), options)

    simulate(engine, workload.requests(rate_per_s=100.0, seed=1, level=level))

    assert engine.loop.admission is not None
    assert len(path.read_text().splitlines()) == engine.loop.admission.num_decisions > 10
    assert replay(path) == []
