"""What it costs to park a request and to bring it back, by way and size; what write-through costs.

`python -m bench.parking.costs [out.json]`. One request is parked and resumed while three others
decode, on a link of 200 MB/s in either direction; and eight requests decode with and without
write-through.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

from bench.layerwise._common import batch, decode_times, report
from bench.parking.table import print_table
from services.executor.kv.options import KVOptions
from services.placement.resume import ResumeWay
from tests.exact.harness import Arrival, EngineCase, StepRunner, make_prompt

LINK_BYTES_PER_S = 2e8
CASE = EngineCase(
    num_blocks=1_200,
    kv=KVOptions(
        host_bytes=128 << 20,
        h2d_bytes_per_s=LINK_BYTES_PER_S,
        d2h_bytes_per_s=LINK_BYTES_PER_S,
        restore_when_free_frac=0.02,
    ),
)
SIZES_TOKENS = (128, 512, 960)
REPETITIONS = 5
COMPANIONS = 3
DEFINITIONS = {
    "park_s": "from park() to the last block given back (median)",
    "park_lagging_s": "the same with nothing mirrored before",
    "resume_s": "from resume() to the request's next token (median)",
    "others_step_s": "longest step of the others meanwhile (median); a normal one is step_s",
    "write_through": "median decode step of eight requests, and the engine's CPU time in it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    park_s: float
    resume_s: float
    longest_step_s: float


class Drive:
    """One engine, stepped by hand."""

    def __init__(self) -> None:
        self.runner = StepRunner(CASE)
        self.scheduler = self.runner.scheduler
        self._num_started = 0

    def start(self, num_tokens: int, num_output: int = 60) -> str:
        self._num_started += 1
        name = f"p{self._num_started}"
        self.runner._add(
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

    def end_all(self) -> None:
        self.runner.engine.abort_request(list(self.scheduler.requests))
        while self.runner.engine.has_unfinished_requests():
            self.step()

    def trip(self, num_tokens: int, way: ResumeWay, *, mirror: bool) -> Trip:
        """Park one request among others, and bring it back."""
        control, through = self.scheduler.control, self.scheduler.transfers.write_through
        control.choose_way = lambda parked, engine: way
        if not mirror:
            through._budget = lambda num_under_way: 0
        name = self.start(num_tokens)
        for _ in range(COMPANIONS):
            self.start(64, num_output=400)
        while self.num_output(name) < 4 or (mirror and through.is_busy):
            self.step()
        began_s = time.perf_counter()
        self.scheduler.park(name)
        steps = []
        while self.scheduler.requests[name] in self.scheduler.running:
            steps.append(self.step())
        parked_s = time.perf_counter()
        num_before = self.num_output(name)
        self.scheduler.resume(name)
        while self.num_output(name) == num_before:
            steps.append(self.step())
        resumed_s = time.perf_counter()
        through.__dict__.update(_budget=self.scheduler._write_budget)
        self.end_all()
        return Trip(
            park_s=parked_s - began_s, resume_s=resumed_s - parked_s, longest_step_s=max(steps)
        )


def trips(drive: Drive) -> list[dict[str, Any]]:
    rows = []
    for num_tokens in SIZES_TOKENS:
        for way in ResumeWay:
            done = [drive.trip(num_tokens, way, mirror=True) for _ in range(REPETITIONS)]
            rows.append(
                {
                    "num_tokens": num_tokens,
                    "way": way.value,
                    "park_s": statistics.median(t.park_s for t in done),
                    "resume_s": statistics.median(t.resume_s for t in done),
                    "others_step_s": statistics.median(t.longest_step_s for t in done),
                }
            )
        lagging = [drive.trip(num_tokens, ResumeWay.LOAD, mirror=False) for _ in range(3)]
        rows.append(
            {
                "num_tokens": num_tokens,
                "way": "load, nothing mirrored before",
                "park_s": statistics.median(t.park_s for t in lagging),
                "resume_s": statistics.median(t.resume_s for t in lagging),
                "others_step_s": statistics.median(t.longest_step_s for t in lagging),
            }
        )
    return rows


def write_through(drive: Drive) -> list[dict[str, Any]]:
    rows = []
    scheduler = drive.scheduler
    first = 1_000
    for repetition in range(6):
        for name, budget in (("off", lambda _: 0), ("on", scheduler._write_budget)):
            scheduler.transfers.write_through._budget = budget
            first += 10
            workload = batch(8, num_prompt_tokens=100, num_output_tokens=100, first=first)
            times = decode_times(drive.runner, workload)
            rows.append(
                {
                    "write_through": name,
                    "repetition": repetition,
                    "step_s": times.wall_s,
                    "engine_cpu_s": times.engine_cpu_s,
                }
            )
    return rows


def main() -> None:
    drive = Drive()
    parking = trips(drive)
    mirroring = write_through(drive)
    drive.runner.close()
    report("parking costs", DEFINITIONS, parking + mirroring)
    print_table(parking)
    print_table(mirroring)


if __name__ == "__main__":
    main()
