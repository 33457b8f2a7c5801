"""What the layer-wise benchmarks share: engines by layer count, decode runs, the report."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.exact.harness import Arrival, StepRunner, make_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Medians over the decode steps of one run."""

    wall_s: float
    cpu_s: float  # of the engine's thread: scheduling, preparation, model; not the copying threads


def batch(
    num_requests: int, *, num_prompt_tokens: int, num_output_tokens: int, first: int = 0
) -> list[Arrival]:
    return [
        Arrival(
            request_id=f"q{first + n}",
            prompt=make_prompt(num_prompt_tokens, seed=n),
            num_output_tokens=num_output_tokens,
        )
        for n in range(num_requests)
    ]


def decode_times(runner: StepRunner, workload: Sequence[Arrival]) -> StepTimes:
    """Run a workload; return medians of the steps in which all of it decodes."""
    wall: list[float] = []
    cpu: list[float] = []
    step: Callable[..., Any] = runner.engine.step

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin_wall, begin_cpu = time.perf_counter(), time.thread_time()
        output = step(*args, **kwargs)
        if all_decode(runner, len(workload)):
            wall.append(time.perf_counter() - begin_wall)
            cpu.append(time.thread_time() - begin_cpu)
        return output

    runner.engine.step = timed
    try:
        runner.run(workload, check=False)
    finally:
        del runner.engine.step
    steady_wall, steady_cpu = wall[5:], cpu[5:]
    return StepTimes(wall_s=statistics.median(steady_wall), cpu_s=statistics.median(steady_cpu))


def all_decode(runner: StepRunner, num_requests: int) -> bool:
    running = runner.scheduler.running
    return len(running) == num_requests and all(r.num_output_tokens > 1 for r in running)


def report(name: str, definitions: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """Write one benchmark's rows as JSON to the path in argv, or to standard output."""
    document = {
        "benchmark": name,
        "commit": _output("git", "rev-parse", "HEAD"),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "num_cpus": os.cpu_count(),
            "load_average": os.getloadavg(),
        },
        "definitions": definitions,
        "rows": rows,
    }
    text = json.dumps(document, indent=1)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
    print(text)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
