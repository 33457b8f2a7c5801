"""What `evenflow bench` makes of its options, before anything is sent."""

import argparse
import importlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.bench import _complete, _levels, _make_parser, command
from cli.local.settings import read_settings
from services.pacing.types import ServiceLevel

pytestmark = pytest.mark.timeout(1_200)  # vLLM is imported

NO_SERVER = "http://127.0.0.1:9"  # discard, which nobody runs


@pytest.fixture(scope="module", autouse=True)
def _vllm_is_imported() -> None:
    """Import it in no test's own time."""
    importlib.import_module("vllm.benchmarks.serve")


@pytest.fixture(autouse=True)
def _no_stack_was_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVENFLOW_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("EVENFLOW_GATEWAY_HTTP_PORT", raising=False)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def parsed(*arguments: str) -> argparse.Namespace:
    args: argparse.Namespace = _make_parser().parse_args(list(arguments))
    return args


def completed(*arguments: str) -> argparse.Namespace:
    args = parsed("--model", "org/m", *arguments)
    _complete(args)
    return args


def promised(*arguments: str) -> list[ServiceLevel]:
    return _levels(parsed(*arguments), _make_parser())


def test_alone_it_is_a_small_load_on_the_local_stack() -> None:
    args = completed()

    assert (args.base_url, args.endpoint) == ("http://127.0.0.1:8000", "/v1/chat/completions")
    assert (args.dataset_name, args.num_prompts, args.request_rate) == ("random", 16, 1.0)
    assert (args.random_input_len, args.random_output_len, args.temperature) == (128, 64, 0.0)


@pytest.mark.parametrize(
    ("arguments", "name", "expected"),
    [
        (["--backend", "openai"], "endpoint", "/v1/completions"),
        (["--endpoint", "/v2/chat/completions"], "endpoint", "/v2/chat/completions"),
        (["--base-url", "http://h:1/v1/"], "base_url", "http://h:1"),
        (["--port", "81"], "base_url", "http://127.0.0.1:81"),
        (["--host", "::1"], "base_url", "http://[::1]:8000"),
        (["--max-concurrency", "4"], "request_rate", float("inf")),
        (["--ramp-up-strategy", "linear"], "request_rate", float("inf")),
        (["--request-rate", "3", "--max-concurrency", "4"], "request_rate", 3.0),
        ([], "tokenizer", "org/m"),
        (["--tokenizer", "t"], "tokenizer", "t"),
        (["--skip-tokenizer-init"], "tokenizer", None),
    ],
)
def test_what_is_said_replaces_what_is_not(arguments: list[str], name: str, expected: Any) -> None:
    assert getattr(completed(*arguments), name) == expected


def running_socket(state_dir: Path) -> Path:
    """Return where the supervisor of the stack "m" listens."""
    return (
        read_settings({"EVENFLOW_STATE_DIR": str(state_dir)}).having({}, name="m").supervisor_socket
    )


def test_the_local_stacks_tokenizer_is_known(tmp_path: Path) -> None:
    started_with = {"EVENFLOW_EXECUTOR_MODEL": "/models/m", "EVENFLOW_GATEWAY_HTTP_PORT": "8123"}
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "started_with.json").write_text(json.dumps(started_with))
    with socket.socket(socket.AF_UNIX) as supervisor:
        supervisor.bind(str(running_socket(tmp_path)))
        supervisor.listen()

        assert completed().tokenizer == "/models/m"
        assert completed("--base-url", "http://127.0.0.1:8123").tokenizer == "/models/m"
        assert completed("--base-url", "http://elsewhere:8123").tokenizer == "org/m"


def test_readers_of_three_rates_are_the_default() -> None:
    assert promised() == [
        ServiceLevel(consumption_rate_tps=rate, pace_tail=True) for rate in (8.0, 12.0, 16.0)
    ]


def test_rates_and_slos_are_promised_together() -> None:
    assert promised("--reading-rates", "20,0", "--slo-tbt-ms", "100", "--slo-ttft-ms", "500") == [
        ServiceLevel(consumption_rate_tps=20.0, slo_tbt_s=0.1, slo_ttft_s=0.5, pace_tail=True),
        ServiceLevel(slo_tbt_s=0.1, slo_ttft_s=0.5),
    ]


def test_a_bound_on_tokens_replaces_the_default_rates() -> None:
    assert promised("--slo-tpot-ms", "50") == [ServiceLevel(slo_tpot_s=0.05)]
    assert len(promised("--slo-ttft-ms", "500")) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--reading-rate", "8"], "did you mean --reading-rates?"),
        (["--reading-rates", "8,-1"], '"8,-1" is no list of tokens per second'),
        (["--reading-rates", "fast"], '"fast" is no list of tokens per second'),
        (["--reading-rates", ""], '"" is no list of tokens per second'),
        (["--slo-tbt-ms", "0"], '"0" is no time > 0 in milliseconds'),
        (["--slo-tbt-ms", "soon"], '"soon" is no time > 0 in milliseconds'),
        (["--slo-tbt-ms", "100", "--reading-rates", "9"], "reads slower than that"),
    ],
)
def test_an_option_at_fault_is_named(arguments: list[str], sentence: str) -> None:
    result = call(*arguments)

    assert result.exit_code == 2
    assert sentence in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--base-url", NO_SERVER], f"no server answers at {NO_SERVER}"),
        (["--base-url", NO_SERVER, "--model", "m"], "--tokenizer: name the directory"),
        (["--backend", "vllm-rerank"], "--backend vllm-rerank: readers need"),
        (["--base-url", NO_SERVER, "--model", "m", "--skip-tokenizer-init"], "Tokenizer must be"),
    ],
)
def test_what_cannot_run_is_told_in_a_sentence(arguments: list[str], sentence: str) -> None:
    result = call(*arguments)

    assert result.exit_code == 1
    assert f"Error: {sentence}" in result.output
