"""One system on one row's requests, and what an engine takes beside its layers."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.e2e.reading.figures import Run, RunKey
from bench.e2e.reading.rows import Place
from bench.e2e.records import RunKey as CalibrationKey
from bench.e2e.records import RunRecord
from bench.e2e.replay import RunError, replay, warm
from bench.e2e.stack import executor, grown, metric_sums, utc_now
from bench.e2e.systems import RESIDENT, Device
from bench.e2e.trace import TracedRequest
from bench.fidelity.machine import calibrated

CALIBRATES = "vllm"
Settings = Mapping[str, object]  # an executor's, without their prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Starts executors. `more`: settings that all systems have, over the device's."""

    planner_address: str
    folder: Path
    more: Settings

    def outside_s(self) -> float:
        """Return what steps take outside the layers, while the pool is nearly full."""
        place, log_path = Place(outside_s=0.0), self.folder / "executor.log"
        settings = {**RESIDENT, **self.more}
        with executor(
            place.room, settings, planner_address=self.planner_address, log_path=log_path
        ) as process:
            asyncio.run(warm(process.address, place.warm_up()))
            requests = asyncio.run(replay(process.address, place.warm_up())).requests
        key = CalibrationKey(system=CALIBRATES, seed=1, slo_scale=1.0)
        run = RunRecord(key=key, slo_s=1.0, requests=tuple(requests), samples=())
        return calibrated(place.room, [run]).outside_s

    def run(
        self,
        key: RunKey,
        device: Device,
        system: Settings,
        *,
        warm_up: Sequence[TracedRequest],
        trace: Sequence[TracedRequest],
    ) -> Run:
        """Start a system anew, warm it up, replay a row's requests."""
        settings = {**system, **self.more}
        log_path = self.folder / f"executor-{key.name}.log"
        with executor(
            device, settings, planner_address=self.planner_address, log_path=log_path
        ) as process:
            asyncio.run(warm(process.address, warm_up))
            before, started = metric_sums(process), utc_now()
            requests = asyncio.run(replay(process.address, trace)).requests
            sums = grown(before, metric_sums(process))
        whole = [r for r in requests if not r.failure]
        if not whole:
            raise RunError(f"all requests failed: {requests[0].failure}")
        seconds = max(r.generated_s[-1] for r in whole)
        print(f"{key.name}: {seconds:.0f} s, {len(requests) - len(whole)} failures", flush=True)
        return Run(
            key=key, requests=tuple(requests), sums=sums, started=started, load=os.getloadavg()[0]
        )
