"""The `evenflow` command, as a user calls it."""

import json
import re

from typer.testing import CliRunner

from simulator.cli import app
from tests.model_configs import GPT_OSS_20B, LLAMA_3_8B

HEURISTIC = "lab.policies.presets:DYNAMIC_HEURISTIC"
SMALL = ["--model", "llama-3-8b", "--device", "a5000", "--pool-tokens", "1024"]


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_simulate_writes_a_line_per_policy_and_all_figures(tmp_path) -> None:
    path = tmp_path / "out" / "report.json"
    result = call(
        "simulate", *SMALL, "--policy", "vllm", "--policy", HEURISTIC,
        "--lengths", "alpaca", "--rate", "1", "--num-requests", "8", "--jobs", "1",
        "--json", str(path),
    )  # fmt: skip
    report = json.loads(path.read_text())

    assert result.exit_code == 0, result.output
    assert "DYNAMIC_HEURISTIC" in result.output
    assert [cell["policy"] for cell in report["cells"]] == ["vllm", "DYNAMIC_HEURISTIC"]
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


SESSIONS = ["--sessions", "8", "--session-steps", "30", "--session-scale", "0.002"]


def test_sessions_are_drawn_and_their_next_steps_are_reported(tmp_path) -> None:
    # Eight sessions of 400 tokens each and more in the end.
    path = tmp_path / "report.json"
    result = call(
        "simulate", "--model", "llama-3-8b", "--device", "a5000", "--pool-tokens", "2048",
        *SESSIONS, "--rate", "1", "--policy", "vllm",
        "--policy", "lab.policies.presets:VLLM_OFFLOADING", "--jobs", "1", "--json", str(path),
    )  # fmt: skip
    report = json.loads(path.read_text())

    assert result.exit_code == 0, result.output
    assert "next P95" in result.output
    vllm, with_host = report["cells"]
    assert vllm["requests"] == with_host["requests"] == 240
    assert vllm["recomputed_tokens"] > with_host["recomputed_tokens"]
    assert 0.0 < with_host["next_ttft_p50_s"] <= with_host["next_ttft_p95_s"]
    assert report["definitions"]["recomputed_tokens"]


def test_sessions_that_have_no_such_means_are_refused() -> None:
    result = call("simulate", *SMALL, "--sessions", "2", "--session-steps", "12")

    assert result.exit_code == 2
    assert "no session of 12 steps" in result.output


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


def test_size_says_what_binds_and_what_host_memory_would_bring(tmp_path) -> None:
    # Llama-3-8B has 131,072 bytes of KV per token, a request of 441 tokens 28 blocks of 16: 2 GB
    # keep 34 copies, and a pool of 10,000 tokens holds 22.
    path = tmp_path / "size.json"
    output = call(
        "size", "--model", "llama-3-8b", "--device", "rtx-4090", "--pool-tokens", "10000",
        "--context", "400", "--answer", "40", "--policy", "vllm", "--ttft-s", "0.001",
        "--host-gb", "2", "--json", str(path),
    ).output  # fmt: skip
    room = json.loads(path.read_text())["room"]

    assert (room["num_held"], room["num_kept"], room["rate_tps"]) == (22, 34, 5.0)
    assert output.startswith("room                 34 requests of 440 tokens are read at once")
    assert "(limit: host)" in output
    assert f"would keep {room['num_sustained']}" in output


def test_size_says_what_one_reader_more_would_have_had() -> None:
    asked = ("size", *SMALL, "--context", "400", "--answer", "40", "--policy", "vllm")

    assert "1 readers or more" in call(*asked, "--max-readers", "1").output
    # A prompt of 400 tokens takes longer than a millisecond: nobody is held.
    hasty = call(*asked, "--ttft-s", "0.001").output
    assert "0 readers; with 1, 100.0% of tokens are in time and 0.0% of first tokens" in hasty


def test_a_model_that_does_not_fit_is_refused_with_a_reason() -> None:
    result = call("size", "--model", "llama-3-70b", "--device", "h100", "--context", "100")

    assert result.exit_code == 2
    assert "no room for KV" in result.output.replace("\n", " ")


def test_a_policy_that_cannot_be_loaded_is_refused_in_a_sentence() -> None:
    for command in (["simulate"], ["size", "--context", "400"]):
        result = call(*command, *SMALL, "--policy", "nowhere:X")

        assert result.exit_code == 2
        assert "policy 'nowhere:X' cannot be loaded" in " ".join(result.output.split())


def test_a_sweep_is_one_page_that_loads_nothing(tmp_path) -> None:
    path = tmp_path / "report.html"
    result = call(
        "simulate", *SMALL, "--policy", "vllm", "--policy", HEURISTIC,
        "--lengths", "alpaca", "--rate", "1", "--rate", "2", "--slo-scale", "1",
        "--slo-scale", "2.5", "--num-requests", "4", "--html", str(path), "--jobs", "1",
    )  # fmt: skip
    page = path.read_text()

    assert result.exit_code == 0, result.output
    # Per SLO: 1 of attainment, 8 over the rate; per rate and SLO: 3 distributions, and of each of
    # the two policies residency and a timeline.
    assert page.count('class="chart"') == 2 * (1 + 8) + 4 * (3 + 2 * 2)
    bare = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "vegaEmbed" not in bare
    assert "vegaEmbed" in page
    assert not re.search(r"<script[^>]|src=|href=", bare)  # it loads nothing
    for drawn in ("Goodput", "TBT as delivered", "residency", "deposit", "P99 of generated TBT"):
        assert drawn in page


def test_a_trace_comes_at_any_rate(tmp_path) -> None:
    trace = tmp_path / "own.jsonl"
    rows = [{"arrival_s": t, "num_prompt_tokens": 30, "num_output_tokens": 5} for t in (0, 10, 20)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "report.json"
    result = call(
        "simulate", *SMALL, "--policy", "vllm", "--trace", str(trace), "--rate", "0.05",
        "--rate", "1", "--json", str(path), "--jobs", "1",
    )  # fmt: skip
    slow, fast = json.loads(path.read_text())["cells"]

    assert result.exit_code == 0, result.output
    # Two gaps of 20 s and of 1 s.
    assert (round(slow["end_s"]), round(fast["end_s"])) == (40, 2)


def test_a_config_is_sized_as_the_model_of_its_name(tmp_path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_3_8B))
    asked = ("--device", "A5000", "--pool-tokens", "1024", "--context", "400", "--answer", "40",
             "--policy", "vllm", "--max-readers", "2")  # fmt: skip
    named, read = (call("size", "--model", one, *asked).output for one in ("llama-3-8b", config))

    assert named.splitlines()[0] == read.splitlines()[0]
    assert named.splitlines()[-1] == read.splitlines()[-1]
    assert "8.03 G parameters" in named
    assert "8.03 G parameters" in read
    assert "counted from config.json" in read


def test_a_model_with_windows_is_sized_and_simulated(tmp_path) -> None:
    config, device = tmp_path / "config.json", tmp_path / "small.toml"
    config.write_text(json.dumps(GPT_OSS_20B))
    device.write_text(
        "memory_bytes = 16e9\nmemory_bytes_per_s = 500e9\nflops_per_s = 90e12\nlink = 'pcie4x16'"
    )
    small = ("--model", str(config), "--device-file", str(device), "--pool-tokens", "4096")
    path = tmp_path / "size.json"
    size = call(
        "size", *small, "--context", "400", "--answer", "40", "--policy", "vllm", "--policy",
        "evenflow", "--max-readers", "4", "--drafts", "1", "--acceptance", "0.5", "--json",
        str(path),
    )  # fmt: skip
    simulated = call(
        "simulate", *small, "--policy", "vllm", "--policy", "orbitflow", "--lengths", "alpaca",
        "--rate", "1", "--num-requests", "6", "--jobs", "1", "--drafts", "2", "--acceptance", "0.8",
        "--draft-frac", "0",
    )  # fmt: skip

    assert size.exit_code == 0, size.output
    assert "12 with a window of 128 tokens" in size.output
    assert "1.50 tokens per step" in size.output
    assert json.loads(path.read_text())["deployment"]["model"]["layers"][1]["num"] == 12
    assert simulated.exit_code == 0, simulated.output
    assert "guess: each token's experts" in simulated.output
    assert "2.44 tokens per step; drafting takes 0%" in simulated.output


WRONG = [
    (["--model", "nothing", "--device", "h100"], "'nothing' is no model"),
    (["--model", "llama-3-8b", "--device", "h1000"], "--device-file takes another"),
    (["--model", "llama-3-8b", "--device-file", "nowhere.toml"], "describes no device"),
    (["--model", "llama-3-8b"], "give --model and --device or --device-file"),
    (["--model", "llama-3-8b", "--device", "h100", "--drafts", "3"], "and --acceptance"),
]


def test_what_is_not_found_is_said_in_a_sentence() -> None:
    for given, said in WRONG:
        result = call("size", *given, "--context", "400")
        output = " ".join(result.output.replace("│", " ").split())

        assert result.exit_code == 2
        assert said in output


def test_a_measured_engine_drafts_as_it_did() -> None:
    result = call("simulate", "--measured", "log", "--drafts", "3", "--acceptance", "1")

    assert result.exit_code == 2
    assert "not with --drafts" in result.output
