"""`python -m bench.e2e`: replay traces against every system in turn, write tables.

Each finished run is a file in the folder of `--out`; a run whose file is there is not repeated,
so that a comparison can be made in pieces. `--quick` shows that everything works; its figures do
not count.
"""

import argparse
import asyncio
import os
import statistics
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from grpc import aio

from bench.e2e.drafting import environment_of, with_drafts
from bench.e2e.records import RunKey, RunRecord, load_all, save
from bench.e2e.replay import Replayed, RunError, replay, warm
from bench.e2e.report import write_report
from bench.e2e.stack import executor, grown, metric_sums, planner, utc_now
from bench.e2e.systems import (
    DEFAULT_SYSTEMS,
    MAX_NUM_SEQS,
    RESIDENT,
    SYSTEMS,
    Device,
)
from bench.e2e.trace import (
    NUM_WARM_UP_REQUESTS,
    READERS,
    TracedRequest,
    poisson_trace,
    recorded_trace,
    stated_slos_s,
    warm_up,
    with_leavers,
    with_slos,
)

NUM_BASE_TOKENS = 120  # output tokens from which the base SLO is measured
LONGEST_RESIDENT_SHARE = 0.75  # of the pool, by the prompt from which the base SLO is measured
MEAN_OUTPUT_TOKENS = 108  # of the synthetic trace


def main() -> None:
    options = _options()
    out: Path = options.out
    devices = [Device(link_bytes_per_s=rate) for rate in options.link_bytes_per_s]
    out.mkdir(parents=True, exist_ok=True)
    with planner(out / "planner.log") as address:
        base_s = options.base_slo_s or _kept_base_slo_s(devices[0], address, out)
        for device in devices:
            link = f"{device.link_bytes_per_s / 1e6:g}MBps"
            folder = out if len(devices) == 1 else out / link
            print(f"base SLO {base_s * 1e3:.1f} ms; {asdict(device)}", flush=True)
            _series(options, base_s, device, (address, folder))


def _series(
    options: argparse.Namespace, base_s: float, device: Device, places: tuple[str, Path]
) -> None:
    """Make the runs of one device that are not there yet, and the report of all."""
    _, folder = places
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    for key in _keys(options):
        path = folder / "runs" / f"{key.name}.json"
        if not path.exists():
            trace = with_leavers(_trace(options, key.seed, base_s), key.leaving, key.seed)
            try:
                save(_run(key, trace, base_s, device, places), path)
            except (RunError, aio.AioRpcError) as error:
                print(f"{key.name}: no figures, see {folder}: {error}", flush=True)
    link_ratio = device.link_bytes_per_s * base_s / device.pool_bytes
    print(write_report(load_all(folder / "runs"), folder / "report", link_ratio=link_ratio))


def _keys(options: argparse.Namespace) -> list[RunKey]:
    """Return the runs in the order in which they are made: systems take turns."""
    keys = [
        RunKey(
            system=system,
            seed=seed,
            slo_scale=scale,
            readers=readers,
            leaving=options.leaving,
            num_drafts=options.drafts,
            acceptance=options.acceptance if options.drafts else None,
        )
        for seed in range(1, options.seeds + 1)
        for readers in options.readers
        for scale in options.scales
        for system in options.systems
    ]
    first = (options.readers[0], options.scales[0])
    return [
        key for key in keys if not key.is_of_all_scales or (key.readers, key.slo_scale) == first
    ]


def _trace(options: argparse.Namespace, seed: int, base_s: float) -> list[TracedRequest]:
    if options.trace is not None:
        return recorded_trace(options.trace, token_scale=options.token_scale, step_s=base_s)
    mean_gap_s = MEAN_OUTPUT_TOKENS * base_s / MAX_NUM_SEQS / options.load
    return poisson_trace(seed=seed, num_requests=options.requests, mean_gap_s=mean_gap_s)


def _kept_base_slo_s(device: Device, planner_address: str, folder: Path) -> float:
    """Return the base SLO of all runs of the folder: measured once."""
    path = folder / "base_slo_s"
    if not path.exists():
        path.write_text(f"{_base_slo_s(device, planner_address, folder)}\n")
    return float(path.read_text())


def _base_slo_s(device: Device, planner_address: str, folder: Path) -> float:
    """Return the median decode step of the longest request that fits without offload."""
    prompt = int(LONGEST_RESIDENT_SHARE * device.pool_tokens)
    alone = TracedRequest(
        request_id="base", arrival_s=0, num_prompt_tokens=prompt, num_output_tokens=NUM_BASE_TOKENS
    )
    with executor(
        device, RESIDENT, planner_address=planner_address, log_path=folder / "executor.log"
    ) as process:
        _warm_up(process.address, slo_s=0)
        (record,) = asyncio.run(replay(process.address, [alone])).requests
    if record.failure:
        raise SystemExit(f"the base SLO cannot be measured: {record.failure}")
    times = record.generated_s
    return statistics.median(b - a for a, b in pairwise(times))


def _run(
    key: RunKey,
    trace: list[TracedRequest],
    base_s: float,
    device: Device,
    places: tuple[str, Path],  # the planner's address, the folder for logs
) -> RunRecord:
    """Start a system anew, warm it up, replay the trace."""
    slo_s = key.slo_scale * base_s
    address, folder = places
    log_path = folder / f"executor-{key.name}.log"
    with executor(
        device,
        with_drafts(SYSTEMS[key.system], key),
        planner_address=address,
        log_path=log_path,
        environment=environment_of(key, trace, device, folder),
    ) as process:
        _warm_up(process.address, slo_s=slo_s)
        before, started = metric_sums(process), utc_now()
        stated = with_slos(trace, stated_slos_s(key.readers, len(trace), slo_s))
        result: Replayed = asyncio.run(replay(process.address, stated))
        sums = grown(before, metric_sums(process))
    failures = [r for r in result.requests if r.failure]
    num_tokens = sum(len(r.generated_s) for r in result.requests)
    print(f"{key.name}: {num_tokens} tokens, {len(failures)} failures", flush=True)
    return RunRecord(
        key=key,
        slo_s=slo_s,
        requests=tuple(result.requests),
        samples=tuple(result.samples),
        sums=sums,
        started=started,
        load=os.getloadavg()[0],
    )


def _warm_up(address: str, *, slo_s: float) -> None:
    trace = warm_up(NUM_WARM_UP_REQUESTS)
    asyncio.run(warm(address, with_slos(trace, [slo_s] * len(trace))))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/e2e"))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(DEFAULT_SYSTEMS))
    parser.add_argument("--scales", nargs="+", type=float, default=[1.0, 1.5, 2.5])
    parser.add_argument("--readers", nargs="+", choices=READERS, default=["paced"])
    parser.add_argument("--leaving", type=float, default=0.0, help="share of readers who leave")
    parser.add_argument("--drafts", type=int, default=0, help="tokens drafted per request and step")
    parser.add_argument(
        "--acceptance", type=float, help="share that a drafter guesses right; none: n-gram"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="of the synthetic trace")
    parser.add_argument("--load", type=float, default=0.8, help="of what full batches could serve")
    parser.add_argument("--trace", type=Path, help="a recorded trace instead")
    parser.add_argument("--token-scale", type=float, default=1 / 16, help="of a recorded trace")
    parser.add_argument(
        "--link-bytes-per-s",
        nargs="+",
        type=float,
        default=[300e6],
        help="several: a folder each, one base SLO",
    )
    parser.add_argument("--base-slo-s", type=float, help="instead of measuring it")
    parser.add_argument("--quick", action="store_true", help="does not count")
    options = parser.parse_args()
    if options.acceptance is not None and not options.drafts:
        parser.error("--acceptance: of how many --drafts?")
    if options.quick:
        options.out = options.out.with_name(options.out.name + "-quick")
        options.seeds, options.requests, options.scales = 1, 6, [1.5]
        options.systems = ["vllm", "dynamic-heuristic", "orbitflow"]
    return options


if __name__ == "__main__":
    main()
