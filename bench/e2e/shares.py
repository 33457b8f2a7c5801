"""Where a step's time goes: `python -m bench.e2e.shares`.

The closed loop runs in this process on the emulated device, the planner in another one. A stopwatch
with one entry per part of the engine's thread charges every moment to exactly one of them.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.sched.scheduler import Scheduler

from bench.document import save
from bench.e2e.systems import BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, NUM_LAYERS, Device
from lab.engine.closed_loop import asking
from lab.engine.step_runner import Arrival, EngineCase, StepRunner, make_prompt
from lab.stack.planner_process import warm_planner
from services.control.options import ControllerOptions
from services.executor.kv_options import GuardMode, KVOptions
from services.executor.request_tag import to_extra_args
from services.executor.scheduler.scheduler import LayerwiseSchedulerMixin
from services.pacing.types import ServiceLevel

PROMPTS_TOKENS = (400, 1_400, 700, 1_000)
SLO_S = 0.045
STEPS_PER_ARRIVAL = 25  # of the workload whose batch changes
DEFINITIONS = {
    "scheduler": "vLLM's schedule() and update_from_output(), less what they call of ours",
    "kv_manager": "block ownership, capacity guard, transfer orders, hooks between the layers",
    "controller": "profile, triggers, snapshots, plan rules",
    "prefill, decode": "the model's forward pass and sampling, emulated time included, in steps "
    "with a prompt and without",
    "stall": "waits for copies between the layers",
    "rest": "the engine's loop: input and output processing",
    "calls_per_request": "plans asked for / requests",
    "planner_e2e": "seconds of all planner calls, transport included / wall time of the run; no "
    "step waits for them",
    "planner_tbt": "median seconds of a planner call / median decode step",
}


class Stopwatch:
    """Charges the time of one thread to the innermost part that is running."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._parts: list[str] = []
        self._since_s = 0.0

    @contextmanager
    def running(self, part: str) -> Iterator[None]:
        self._charge()
        self._parts.append(part)
        try:
            yield
        finally:
            self._charge()
            self._parts.pop()

    def _charge(self) -> None:
        now_s = time.perf_counter()
        if self._parts:
            self.seconds[self._parts[-1]] += now_s - self._since_s
        self._since_s = now_s


class Listener:
    """Lets a stopwatch run around methods of the engine, for a while."""

    def __init__(self, runner: StepRunner) -> None:
        self.watch = Stopwatch()
        self.calls_s: list[float] = []  # of the planner
        self.decode_steps_s: list[float] = []
        self._runner = runner
        self._is_prefill = False
        self._undo = ExitStack()

    def __enter__(self) -> "Listener":
        core, scheduler = self._runner.core, self._runner.scheduler
        connector: Any = get_kv_transfer_group()
        device = connector._device
        self._wrap(self._runner.engine, "step", self._step)
        for part, owner, names in (
            ("kv_manager", LayerwiseSchedulerMixin, ("schedule", "update_from_output")),
            ("controller", scheduler.loop, ("before_schedule", "after_schedule", "after_update")),
            ("scheduler", Scheduler, ("update_from_output",)),
            ("kv_manager", scheduler._coordinator, ("allocate_new_blocks", "free")),
            ("kv_manager", scheduler._coordinator, ("get_num_blocks_to_allocate",)),
            ("kv_manager", scheduler.connector, ("build_connector_meta",)),
            ("model", core.model_executor, ("execute_model", "sample_tokens")),
            ("kv_manager", connector, ("start_load_kv", "wait_for_layer_load", "save_kv_layer")),
            ("kv_manager", connector, ("wait_for_save", "build_connector_worker_meta")),
            ("model", device, ("end_layer",)),
            ("stall", connector.runner.watch.engine, ("wait",)),
        ):
            for name in names:
                self._wrap(owner, name, self._timed(part))
        self._wrap(Scheduler, "schedule", self._schedule)
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        method = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(method, *args, **kwargs)

        own = vars(owner).get(name)
        setattr(owner, name, wrapped)
        undo = (delattr, owner, name) if own is None else (setattr, owner, name, own)
        self._undo.callback(*undo)

    def _timed(self, part: str) -> Callable[..., Any]:
        def around(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            name = part
            if part == "model":
                name = "prefill" if self._is_prefill else "decode"
            with self.watch.running(name):
                return method(*args, **kwargs)

        return around

    def _step(self, step: Callable[..., Any]) -> Any:
        begin_s = time.perf_counter()
        with self.watch.running("rest"):
            outputs = step()
        if not self._is_prefill:
            self.decode_steps_s.append(time.perf_counter() - begin_s)
        return outputs

    def _schedule(self, schedule: Callable[..., Any], *args: Any) -> Any:
        with self.watch.running("scheduler"):
            output = schedule(*args)
        self._is_prefill = any(n > 1 for n in output.num_scheduled_tokens.values())
        return output

    def listen_to_planner(self, client: Any) -> None:
        def around(method: Callable[..., Any], *args: Any) -> Any:
            begin_s = time.perf_counter()
            answer = method(*args)
            self.calls_s.append(time.perf_counter() - begin_s)
            return answer

        self._wrap(client, "_plan_for", around)


def workloads() -> dict[str, list[Arrival]]:
    """Return Table 1's three: which of batch and contexts change."""
    return {
        "both static": _requests(4, num_output_tokens=30, gap=0),
        "token dynamic": _requests(4, num_output_tokens=300, gap=0),
        "both dynamic": _requests(20, num_output_tokens=150, gap=STEPS_PER_ARRIVAL),
    }


def _requests(num_requests: int, *, num_output_tokens: int, gap: int) -> list[Arrival]:
    tag = to_extra_args(ServiceLevel(slo_tbt_s=SLO_S))
    return [
        Arrival(
            request_id=f"q{number}",
            prompt=make_prompt(PROMPTS_TOKENS[number % len(PROMPTS_TOKENS)], seed=number),
            num_output_tokens=num_output_tokens,
            step=number * gap,
            sampling={"extra_args": tag},
        )
        for number in range(num_requests)
    ]


def measure(runner: StepRunner, address: str, workload: Sequence[Arrival]) -> dict[str, Any]:
    with asking(runner, address) as loop, Listener(runner) as listener:
        listener.listen_to_planner(loop.planning._planner)
        begin_s = time.perf_counter()
        outcome = runner.run(workload, check=False)
        wall_s = time.perf_counter() - begin_s
        asked = loop.counts.plans["asked"]
    seconds = listener.watch.seconds
    total_s = sum(seconds.values())
    return {
        "num_steps": outcome.num_steps,
        "wall_s": wall_s,
        "shares": {part: seconds[part] / total_s for part in sorted(seconds)},
        "calls_per_request": asked / len(workload),
        "planner_e2e": sum(listener.calls_s) / wall_s,
        "planner_tbt": statistics.median(listener.calls_s)
        / statistics.median(listener.decode_steps_s),
    }


def main() -> None:
    options = _options()
    rows = []
    runner = StepRunner(_case(Device(), GuardMode(options.guard)))
    try:
        with warm_planner(num_groups=NUM_LAYERS) as address:
            runner.run(_requests(1, num_output_tokens=2, gap=0), check=False)  # calibrates
            for turn in range(options.turns):
                for name, workload in workloads().items():
                    row = {"workload": name, "turn": turn} | measure(runner, address, workload)
                    rows.append(row)
    finally:
        runner.close()
    document = {
        "definitions": DEFINITIONS,
        "guard": options.guard,
        "load": os.getloadavg()[0],
        "rows": rows,
    }
    save(document, options.out)
    print(table(rows))


def _case(device: Device, guard: GuardMode) -> EngineCase:
    kv = KVOptions(
        host_bytes=256 << 20,
        integrity_guard=guard,
        h2d_bytes_per_s=device.link_bytes_per_s,
    )
    return EngineCase(
        num_blocks=device.pool_tokens // BLOCK_SIZE * NUM_LAYERS,
        kv=kv,
        controller=ControllerOptions(),
        layer_time=device.layer_time,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=512,
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return medians over the turns as Markdown."""
    parts = sorted({part for row in rows for part in row["shares"]})
    others = ("calls_per_request", "planner_e2e", "planner_tbt")
    lines = ["| workload | " + " | ".join((*parts, *others)) + " |"]
    lines.append("|---" * (1 + len(parts) + len(others)) + "|")
    for name in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == name]
        cells = [f"{statistics.median(r['shares'].get(p, 0.0) for r in mine):.1%}" for p in parts]
        calls, *planner = (statistics.median(r[k] for r in mine) for k in others)
        cells += [f"{calls:.1f}", *(f"{share:.1%}" for share in planner)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/shares.json"))
    parser.add_argument("--guard", choices=[m.value for m in GuardMode], default="sample")
    parser.add_argument("--turns", type=int, default=3, help="how often each workload runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
