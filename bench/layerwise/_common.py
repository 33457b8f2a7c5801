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

from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.exact.harness import Arrival, StepRunner, make_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Of the decode steps of one run."""

    wall_s: float  # median
    # CPU time of the engine's thread outside the model's own work: scheduling, preparation,
    # metadata, sampling, output, and our hooks between layers. First quartile, for the machine's
    # other processes only ever add.
    engine_cpu_s: float


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
    """Run a workload; return the times of the steps in which all of it decodes."""
    model = _CpuClock(
        runner.core.model_executor.driver_worker.worker.model_runner, "_model_forward"
    )
    clocks = [model]
    if runner.case.kv is not None:
        connector = get_kv_transfer_group()
        hooks = [_CpuClock(connector, n) for n in ("wait_for_layer_load", "save_kv_layer")]
        clocks.extend(hooks)
    wall: list[float] = []
    cpu: list[float] = []
    step: Callable[..., Any] = runner.engine.step

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin_wall, begin_cpu = time.perf_counter(), time.thread_time()
        before = [clock.seconds for clock in clocks]
        output = step(*args, **kwargs)
        if all_decode(runner, len(workload)):
            spent = [c.seconds - b for c, b in zip(clocks, before, strict=True)]
            wall.append(time.perf_counter() - begin_wall)
            cpu.append(time.thread_time() - begin_cpu - spent[0] + sum(spent[1:]))
        return output

    runner.engine.step = timed
    try:
        runner.run(workload, check=False)
    finally:
        del runner.engine.step
        for clock in clocks:
            clock.stop()
    return StepTimes(
        wall_s=statistics.median(wall[5:]), engine_cpu_s=statistics.quantiles(cpu[5:], n=4)[0]
    )


class _CpuClock:
    """Sums the CPU time of one method."""

    def __init__(self, target: Any, name: str) -> None:
        self.seconds = 0.0
        self._target, self._name = target, name
        method = getattr(target, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begin

        setattr(target, name, timed)

    def stop(self) -> None:
        delattr(self._target, self._name)


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
