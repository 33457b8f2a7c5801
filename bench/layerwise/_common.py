"""What the layer-wise benchmarks share: workloads and times of decode steps."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from bench.document import Row
from lab.engine.step_runner import Arrival, Hook, StepRunner, make_prompt

NUM_WARM_STEPS = 5  # first decode steps that are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Medians over the decode steps of one run, seconds."""

    wall_s: float
    # CPU time outside the model's own layers: scheduling, input preparation, metadata, sampling,
    # output, and the hooks between layers. Of the engine's thread; of the whole process, copying
    # threads included.
    thread_cpu_s: float
    process_cpu_s: float


def batch(num_requests: int, *, num_prompt_tokens: int, num_output_tokens: int) -> list[Arrival]:
    return [
        Arrival(
            request_id=f"q{n}",
            prompt=make_prompt(num_prompt_tokens, seed=n),
            num_output_tokens=num_output_tokens,
        )
        for n in range(num_requests)
    ]


def decode_times(
    runner: StepRunner, workload: Sequence[Arrival], *, hook: Hook | None = None
) -> StepTimes:
    """Run a workload; return the times of the steps in which all of it decodes."""
    model_runner = runner.core.model_executor.driver_worker.worker.model_runner
    clocks = [_CpuClock(model_runner, "_model_forward")]
    if runner.case.kv is not None:
        connector = get_kv_transfer_group()
        clocks += [_CpuClock(connector, n) for n in ("wait_for_layer_load", "save_kv_layer")]
    samples: list[tuple[float, float, float]] = []
    step: Callable[..., Any] = runner.engine.step

    def timed(*args: Any, **kwargs: Any) -> Any:
        layers_s = clocks[0].seconds - sum(clock.seconds for clock in clocks[1:])
        begin = time.perf_counter(), time.thread_time(), time.process_time()
        output = step(*args, **kwargs)
        end = time.perf_counter(), time.thread_time(), time.process_time()
        layers_s = clocks[0].seconds - sum(clock.seconds for clock in clocks[1:]) - layers_s
        if all_decode(runner, len(workload)):
            wall_s, thread_s, process_s = (b - a for a, b in zip(begin, end, strict=True))
            samples.append((wall_s, thread_s - layers_s, process_s - layers_s))
        return output

    runner.engine.step = timed
    try:
        runner.run(workload, hook=hook, check=False)
    finally:
        del runner.engine.step
        for clock in clocks:
            clock.stop()
    wall, thread, process = zip(*samples[NUM_WARM_STEPS:], strict=True)
    return StepTimes(
        wall_s=statistics.median(wall),
        thread_cpu_s=statistics.median(thread),
        process_cpu_s=statistics.median(process),
    )


class _CpuClock:
    """Sums the CPU time of one method, on the calling thread."""

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


def median_of(rows: Iterable[Row], name: str) -> float:
    return float(statistics.median(row[name] for row in rows))
