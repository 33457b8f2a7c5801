"""What it costs to park a request and to bring it back, by way and size; what write-through costs.

One request is parked and resumed while three others decode, on a link of 200 MB/s in either
direction; and eight requests decode with and without write-through, in turns on one engine.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.document import Benchmark, Row
from bench.layerwise._common import batch, decode_times, median_of
from lab.engine.orders import forget_free_blocks, park, resume
from lab.engine.step_runner import Arrival, EngineCase, StepRunner, make_prompt
from services.executor.kv_options import KVOptions
from services.placement.run.resume import ResumeWay

LINK_BYTES_PER_S = 2e8
CASE = EngineCase(
    num_blocks=1_200,
    kv=KVOptions(
        prefix_caching=False,  # the same prompts come again and again
        host_bytes=128 << 20,
        h2d_bytes_per_s=LINK_BYTES_PER_S,
        d2h_bytes_per_s=LINK_BYTES_PER_S,
        restore_when_free_frac=0.02,
    ),
)
SIZES_TOKENS = (128, 512, 960)
REPETITIONS = 5
COMPANIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    park_s: float
    resume_s: float
    longest_step_s: float


class Drive:
    """One engine, stepped by hand."""

    def __init__(self, case: EngineCase = CASE) -> None:
        self.runner = StepRunner(case)
        self.scheduler = self.runner.scheduler
        self._num_started = 0

    def start(self, num_tokens: int, num_output: int = 60) -> str:
        self._num_started += 1
        name = f"p{self._num_started}"
        self.runner.add(
            Arrival(
                request_id=name,
                prompt=make_prompt(num_tokens, seed=self._num_started),
                num_output_tokens=num_output,
            )
        )
        return name

    def step(self) -> float:
        began_s = time.perf_counter()
        self.runner.engine.step()
        return time.perf_counter() - began_s

    def num_output(self, name: str) -> int:
        return int(self.scheduler.requests[name].num_output_tokens)

    def is_copied(self, name: str) -> bool:
        """Say whether a request that decodes is on the host, too, but for its newest block."""
        kv = self.scheduler.records[name].kv
        if kv is None or self.num_output(name) < 4:
            return False
        return bool(kv.num_host_blocks >= max(1, kv.num_full_blocks - 1))

    def end_all(self) -> None:
        self.runner.engine.abort_request(list(self.scheduler.requests))
        while self.runner.engine.has_unfinished_requests():
            self.step()

    def trip(self, num_tokens: int, way: ResumeWay) -> Trip:
        """Park one request among others, and bring it back."""
        self.scheduler.control.resumes.choose_way = lambda parked, engine: way
        name = self.start(num_tokens)
        for _ in range(COMPANIONS):
            self.start(64, num_output=400)
        while not self.is_copied(name):
            self.step()
        began_s = time.perf_counter()
        park(self.scheduler, name)
        steps = []
        while self.scheduler.requests[name] in self.scheduler.running:
            steps.append(self.step())
        parked_s = time.perf_counter()
        num_before = self.num_output(name)
        forget_free_blocks(self.scheduler)
        resume(self.scheduler, name)
        while self.num_output(name) == num_before:
            steps.append(self.step())
        resumed_s = time.perf_counter()
        self.end_all()
        return Trip(
            park_s=parked_s - began_s, resume_s=resumed_s - parked_s, longest_step_s=max(steps)
        )


def trips() -> list[Row]:
    drive = Drive()
    rows: list[Row] = []
    for num_tokens in SIZES_TOKENS:
        for way in ResumeWay:
            done = [drive.trip(num_tokens, way) for _ in range(REPETITIONS)]
            rows.append(_trip_row(num_tokens, way.value, done))
    drive.runner.close()
    return rows


def _trip_row(num_tokens: int, way: str, done: Sequence[Trip]) -> Row:
    return {
        "num_tokens": num_tokens,
        "way": way,
        "park_s": statistics.median(trip.park_s for trip in done),
        "resume_s": statistics.median(trip.resume_s for trip in done),
        "longest_step_s": statistics.median(trip.longest_step_s for trip in done),
    }


def trip_table(rows: Sequence[Row]) -> list[list[str]]:
    header = ["tokens", "way", "park (ms)", "resume (ms)", "longest step (ms)"]
    return [header] + [
        [str(row["num_tokens"]), row["way"]]
        + [f"{1e3 * row[name]:.1f}" for name in ("park_s", "resume_s", "longest_step_s")]
        for row in rows
    ]


def write_through() -> list[Row]:
    runner = StepRunner(CASE)
    through = runner.scheduler.transfers.write_through
    counters = runner.scheduler.block_owner.counters
    budgets = {"off": lambda num_under_way: 0, "on": runner.scheduler._write_budget}
    rows: list[Row] = []
    for _ in range(6):
        for name, budget in budgets.items():
            through._budget = budget
            num_before = counters.num_mirrored_blocks
            times = decode_times(runner, batch(8, num_prompt_tokens=100, num_output_tokens=100))
            rows.append(
                {
                    "write_through": name,
                    "num_mirrored_blocks": counters.num_mirrored_blocks - num_before,
                    "step_s": times.wall_s,
                    "thread_cpu_s": times.thread_cpu_s,
                    "process_cpu_s": times.process_cpu_s,
                }
            )
    runner.close()
    return rows


def write_through_table(rows: Sequence[Row]) -> list[list[str]]:
    names = ("step_s", "thread_cpu_s", "process_cpu_s")
    table = [
        ["write-through", "blocks per run", "step (ms)", "thread CPU (ms)", "process CPU (ms)"]
    ]
    for kind in ("off", "on"):
        mine = [row for row in rows if row["write_through"] == kind]
        table.append(
            [kind, f"{median_of(mine, 'num_mirrored_blocks'):.0f}"]
            + [f"{1e3 * median_of(mine, name):.2f}" for name in names]
        )
    return table


TRIPS = Benchmark(
    name="trips",
    title="Parking a request and bringing it back",
    definitions={
        "park": "from the order to the last block given back, median of five",
        "resume": "from the end of its hold to the request's next token",
        "longest step": "of the others, from the order to that token",
    },
    measure=trips,
    table=trip_table,
)
WRITE_THROUGH = Benchmark(
    name="write-through",
    title="Write-through's share of a decode step of eight requests",
    definitions={
        "step": "wall time, median over decode steps and six runs",
        "thread CPU": "of the engine's thread, outside the model's layers",
        "process CPU": "the same, copying threads included",
    },
    measure=write_through,
    table=write_through_table,
)
