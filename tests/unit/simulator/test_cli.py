"""The `evenflow` command, as a user calls it."""

import json

from typer.testing import CliRunner

from simulator.cli import app
from simulator.deployment import Deployment
from simulator.grid import Cell, Workload, run_cells
from simulator.hardware import assumptions, device, model
from simulator.workload import constant_length

SMALL = ["--model", "llama-3-8b", "--device", "a5000", "--pool-tokens", "1024"]


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_simulate_writes_a_line_per_policy_and_all_figures(tmp_path) -> None:
    path = tmp_path / "out" / "report.json"
    result = call(
        "simulate", *SMALL, "--policy", "vllm", "--policy", "dynamic-heuristic",
        "--lengths", "alpaca", "--rate", "1", "--num-requests", "8", "--json", str(path),
    )  # fmt: skip
    report = json.loads(path.read_text())

    assert result.exit_code == 0, result.output
    assert "dynamic-heuristic" in result.output
    assert [cell["policy"] for cell in report["cells"]] == ["vllm", "dynamic-heuristic"]
    assert all(0.0 <= cell["tbt"] <= cell["tbt_deposit"] <= 1.0 for cell in report["cells"])
    assert report["deployment"]["device"]["source"]
    assert report["definitions"]["tbt"]
    assert report["base_slo_s"] > 0


def test_a_trace_is_replayed(tmp_path) -> None:
    trace = tmp_path / "own.jsonl"
    trace.write_text('{"arrival_s": 0, "num_prompt_tokens": 30, "num_output_tokens": 5}\n' * 2)
    path = tmp_path / "report.json"

    result = call(
        "simulate", *SMALL, "--policy", "vllm", "--trace", str(trace), "--json", str(path)
    )

    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["cells"][0]["output_tokens"] == 10


def test_size_answers_for_each_policy(tmp_path) -> None:
    path = tmp_path / "size.json"
    result = call(
        "size", *SMALL, "--context", "400", "--answer", "40", "--policy", "vllm",
        "--max-readers", "4", "--json", str(path),
    )  # fmt: skip
    report = json.loads(path.read_text())

    assert result.exit_code == 0, result.output
    # 440 tokens each in a pool of 1024: two fit, and a third waits for a place in time.
    assert report["answers"]["vllm"]["readers"] >= 2
    assert report["answers"]["vllm"]["trials"][0]["num_readers"] == 1


def test_a_model_that_does_not_fit_is_refused_with_a_reason() -> None:
    result = call("size", "--model", "llama-3-70b", "--device", "h100", "--context", "100")

    assert result.exit_code == 2
    assert "no room for KV" in result.output.replace("\n", " ")


def test_answers_do_not_depend_on_the_number_of_processes() -> None:
    deployment = Deployment(
        model=model("llama-3-8b"),
        device=device("a5000"),
        assumptions=assumptions(),
        pool_tokens=512,
    )
    workload = Workload(lengths=(constant_length(40), constant_length(10)), num_requests=4)
    cells = [
        Cell(deployment=deployment, workload=workload, policy="vllm", rate_per_s=r, slo_tbt_s=0.05)
        for r in (1.0, 5.0)
    ]

    assert run_cells(cells, jobs=2) == run_cells(cells, jobs=1)
