"""An engine that its own executor has measured."""

import json

import pytest
from typer.testing import CliRunner

from evenflow.planner.v1 import planner_pb2 as pb
from lab.planning.protos import make_engine, make_plan_request
from services.planner.convert import snapshot_from_proto
from services.planner.decision_log import line_of
from simulator.cli import app
from simulator.device.costs import StepLoad
from simulator.hcache import PRESET
from simulator.measured import read_decision_log

PROFILE = pb.Profile(
    outside_layers_s=0.004,
    layer_base_s=0.001,
    layer_s_per_token=1e-5,
    layer_s_per_context_token=1e-7,
    prefill_s_per_token=5e-5,
    mean_tpot_s=0.02,
)
LINK = pb.Link(
    bytes_per_s=4e9, peak_bytes_per_s=5e9, copy_overhead_s=1e-5, chunk_bytes=1 << 20,
    num_queued_bytes=7,
)  # fmt: skip


def written(folder, *, older=(), **overrides):
    given = {"engine": make_engine(), "profile": PROFILE, "h2d": LINK}
    request = make_plan_request(**(given | overrides))
    path = folder / "decisions.jsonl"
    path.write_text("".join([*older, line_of(request.snapshot, pb.Plan(epoch=1)) + "\n"]))
    return path, request


def test_the_newest_snapshot_is_read_as_the_planner_reads_it(tmp_path) -> None:
    older, _ = written(tmp_path, engine=make_engine(num_blocks=7))
    path, request = written(tmp_path, older=[older.read_text()])
    found, snapshot = read_decision_log(path), snapshot_from_proto(request)

    assert found.engine == snapshot.engine
    assert found.profile == snapshot.profile
    assert found.machine().link_bytes_per_s == 5e9
    assert found.link.num_queued_bytes == 0


def test_steps_take_what_the_profile_says(tmp_path) -> None:
    path, _ = written(tmp_path)
    deployment = read_decision_log(path)
    costs, layers = deployment.machine().costs, deployment.engine.num_layers

    def step_s(load: StepLoad) -> float:
        return layers * costs.layer_s(load) + costs.outside_s(load)

    decodes = StepLoad(num_decodes=2, num_context_tokens=1_000)
    # Per layer 1 ms, 2 x 10 us and 1,000 x 0.1 us; 4 ms outside.
    assert step_s(decodes) == pytest.approx(layers * 0.00112 + 0.004)
    # A prompt alone: 50 us per token of the whole step, and beside decodes on top of theirs.
    assert step_s(StepLoad(chunks=[(400, 0)])) == pytest.approx(0.02)
    both = StepLoad(num_decodes=2, num_context_tokens=1_000, chunks=[(400, 0)])
    assert step_s(both) == pytest.approx(step_s(decodes) + 0.02)


@pytest.mark.parametrize("missing", ["profile", "h2d", "engine"])
def test_a_snapshot_that_was_not_measured_is_refused(tmp_path, missing) -> None:
    path, _ = written(tmp_path)
    entry = json.loads(path.read_text())
    del entry["snapshot"][missing]
    path.write_text(json.dumps(entry))

    with pytest.raises(ValueError, match=missing):
        read_decision_log(path)


def test_an_empty_log_is_refused(tmp_path) -> None:
    (tmp_path / "empty.jsonl").write_text("")

    with pytest.raises(ValueError, match=r"empty\.jsonl"):
        read_decision_log(tmp_path / "empty.jsonl")


def test_simulate_runs_on_a_measured_engine(tmp_path) -> None:
    path, _ = written(tmp_path, engine=make_engine(num_layers=4, num_blocks=4_000))
    report = tmp_path / "report.json"
    result = CliRunner().invoke(
        app,
        ["simulate", "--measured", str(path), "--policy", "vllm", "--lengths", "alpaca",
         "--num-requests", "4", "--jobs", "1", "--json", str(report)],
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    assert json.loads(report.read_text())["deployment"]["engine"]["num_blocks"] == 4_000


def test_simulate_needs_an_engine() -> None:
    result = CliRunner().invoke(app, ["simulate", "--model", "llama-3-8b"])

    assert result.exit_code == 2
    assert "--measured" in result.output


def test_simulate_refuses_what_is_not_measured_of_an_engine(tmp_path) -> None:
    path, _ = written(tmp_path, engine=make_engine(num_layers=4, num_blocks=4_000))
    result = CliRunner().invoke(
        app, ["simulate", "--measured", str(path), "--policy", "vllm", "--policy", PRESET]
    )

    assert result.exit_code == 2, result.output
    said = " ".join(result.output.replace("│", " ").split())
    assert "HCACHE needs a model and a device" in said
