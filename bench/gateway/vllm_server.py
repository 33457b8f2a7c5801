"""What gateway and executor add to an engine, against vLLM's own OpenAI server."""

import contextlib
import io
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

from bench.document import Benchmark, Row
from bench.gateway.processes import cpu_s, running, tree, wait_until
from lab.models import exactness_model
from lab.stack.ports import free_port
from lab.stack.processes import ENGINE_ENVIRONMENT

MODEL = "exactness"
NUM_REPEATS = 3
INPUT_TOKENS, OUTPUT_TOKENS = 128, 64
LOADS = ((1, 12), (16, 64))  # requests at a time, requests in all
# The same engine on both sides, under vLLM's names.
ENGINE = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 256 << 20,
}
SYSTEMS = ("vLLM", "Evenflow")


@dataclass(frozen=True, slots=True)
class System:
    """A running server and all of its processes."""

    port: int
    processes: list[psutil.Process]

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU time of all processes, and of those that are not the engine's core."""
        front = [p for p in self.processes if "VLLM::" not in " ".join(p.cmdline())]
        return cpu_s(self.processes), cpu_s(front)


def measure() -> list[Row]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        log = stack.enter_context((Path(folder) / "servers.log").open("w"))
        systems = {
            "vLLM": stack.enter_context(_stock(log)),
            "Evenflow": stack.enter_context(_evenflow(log)),
        }
        for system in systems.values():
            _load(system, at_once=4, num_prompts=4, seed=99)  # warm
        rows = []
        for at_once, num_prompts in LOADS:
            for repeat in range(NUM_REPEATS):
                for name, system in systems.items():  # taking turns
                    figures = _load(system, at_once=at_once, num_prompts=num_prompts, seed=repeat)
                    rows.append({"system": name, "at_once": at_once, "repeat": repeat} | figures)
        return rows


@contextmanager
def _stock(log: IO[str]) -> Iterator[System]:
    port = free_port()
    options = [part for k, v in ENGINE.items() for part in (f"--{k.replace('_', '-')}", str(v))]
    with running(
        "vllm.entrypoints.openai.api_server",
        *("--model", str(exactness_model()), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--no-enable-prefix-caching"),
        *options,
        settings=ENGINE_ENVIRONMENT,
        log=log,
    ) as server:
        wait_until(lambda: _answers(port, "/health"), "vLLM's server")
        yield System(port, tree(server.pid))


@contextmanager
def _evenflow(log: IO[str]) -> Iterator[System]:
    executor_port, port = free_port(), free_port()
    executor = {
        "GRPC_PORT": executor_port,
        "METRICS_PORT": 0,
        "TRACKER": "",
        "MODEL": exactness_model(),
        "SERVED_MODEL_NAME": MODEL,
        "ENFORCE_EAGER": 1,
        "ENABLE_PREFIX_CACHING": 0,
        **{name.upper(): value for name, value in ENGINE.items()},
    }
    gateway = {
        "HTTP_PORT": port,
        "GRPC_PORT": 0,
        "METRICS_PORT": 0,
        "TRACKER": "",
        "EXECUTORS": f"127.0.0.1:{executor_port}",
    }
    settings = {f"EVENFLOW_EXECUTOR_{name}": value for name, value in executor.items()}
    settings |= {f"EVENFLOW_GATEWAY_{name}": value for name, value in gateway.items()}
    settings |= ENGINE_ENVIRONMENT
    with (
        running("services.executor", settings=settings, log=log) as engine,
        running("services.gateway", settings=settings, log=log) as front,
    ):
        wait_until(lambda: _answers(port, "/ready"), "the gateway")
        yield System(port, tree(engine.pid) + tree(front.pid))


def _answers(port: int, path: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _load(system: System, *, at_once: int, num_prompts: int, seed: int) -> Row:
    """Have vLLM's load generator ask for answers; return its figures and the CPU time of them."""
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    options: dict[str, Any] = {
        "backend": "openai",
        "endpoint": "/v1/completions",
        "base-url": f"http://127.0.0.1:{system.port}",
        "model": str(exactness_model()),
        "served-model-name": MODEL,
        "dataset-name": "random",
        "random-input-len": INPUT_TOKENS,
        "random-output-len": OUTPUT_TOKENS,
        "num-prompts": num_prompts,
        "max-concurrency": at_once,
        "temperature": 0,
        "seed": seed,
        "percentile-metrics": "ttft,itl",
        "metric-percentiles": "50,99",
    }
    arguments = [part for k, v in options.items() for part in (f"--{k}", str(v))]
    before = system.cpu_s()
    with contextlib.redirect_stdout(io.StringIO()):
        result = serve.main(parser.parse_args([*arguments, "--disable-tqdm"]))
    used_s, front_s = (after - b for after, b in zip(system.cpu_s(), before, strict=True))
    num_tokens = result["total_output_tokens"]
    if result["completed"] != num_prompts or num_tokens != num_prompts * OUTPUT_TOKENS:
        raise RuntimeError(f"{result['completed']} answers with {num_tokens} tokens")
    return {
        "ttft_p50_s": result["p50_ttft_ms"] / 1e3,
        "ttft_p99_s": result["p99_ttft_ms"] / 1e3,
        "tbt_p50_s": result["p50_itl_ms"] / 1e3,
        "tbt_p99_s": result["p99_itl_ms"] / 1e3,
        "tokens_per_s": result["output_throughput"],
        "cpu_per_token_s": used_s / num_tokens,
        "front_cpu_per_token_s": front_s / num_tokens,
    }


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = ["at a time", "server", "TTFT ms p50", "p99", "TBT ms p50", "p99", "tokens/s"]
    lines = [[*header, "CPU s / 1,000 tokens", "of it outside the core"]]
    for at_once, _ in LOADS:
        for name in SYSTEMS:
            of_it = [row for row in rows if (row["at_once"], row["system"]) == (at_once, name)]
            figures = {
                key: statistics.median(row[key] for row in of_it)
                for key in of_it[0]
                if key != "system"
            }
            lines.append([str(at_once), name, *_cells(figures)])
    return lines


def _cells(figures: Row) -> list[str]:
    times = ("ttft_p50_s", "ttft_p99_s", "tbt_p50_s", "tbt_p99_s")
    return [
        *(f"{figures[name] * 1e3:.1f}" for name in times),
        f"{figures['tokens_per_s']:.0f}",
        f"{figures['cpu_per_token_s'] * 1e3:.2f}",
        f"{figures['front_cpu_per_token_s'] * 1e3:.2f}",
    ]


BENCHMARK = Benchmark(
    name="vllm",
    title="Gateway and executor against vLLM's own OpenAI server",
    definitions={
        "server": "`python -m vllm.entrypoints.openai.api_server`, or gateway and executor; the "
        "same engine options, prefix caching and layer-wise KV off; both run all the time and are "
        f"asked in turn, medians of {NUM_REPEATS} runs each",
        "load": "vllm.benchmarks.serve, /v1/completions streamed, prompts of "
        f"{INPUT_TOKENS} random tokens, {OUTPUT_TOKENS} tokens of answer; it runs on the same "
        "cores",
        "TTFT, TBT": "as vllm.benchmarks.serve measures them; TBT is its ITL",
        "CPU": "of all processes of the server, over output tokens; the core is vLLM's EngineCore",
    },
    measure=measure,
    table=table,
)
