"""Predicted against observed step latency over random placements: `python -m bench.e2e.prediction`.

Random batches get random placements on the emulated device; the planner's latency model, fed with
the device's own numbers and the time outside the layers of an all-resident step, says how long a
decode step should take. The engine runs in this process.
"""

import argparse
import os
import random
import statistics
from pathlib import Path
from typing import Any

from bench.document import save
from bench.e2e.systems import BLOCK_BYTES, BLOCK_SIZE, NUM_LAYERS, Device
from bench.layerwise._common import batch, decode_times
from lab.engine.step_runner import Arrival, EngineCase, StepRunner, make_prompt
from lab.engine.workloads import fixed
from services.executor.kv_options import KVOptions
from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import Pattern, make_pattern

SEED = 2026
NUM_OUTPUT_TOKENS = 20  # the first decode steps settle the placement and are not counted
MAX_REQUESTS = 4
PROMPT_TOKENS = (200, 1_400)
DEFINITIONS = {
    "measured_s": "median wall time of at least five decode steps with one placement",
    "predicted_s": "compute and stalls of the longest path, and outside_s",
    "outside_s": "median decode step with everything resident, less its layers",
    "mape": "mean of |predicted - measured| / measured over the placements",
}


def main() -> None:
    options = _options()
    device, rng = Device(link_bytes_per_s=options.link_bytes_per_s), random.Random(SEED)
    runner = StepRunner(_case(device))
    try:
        alone = batch(1, num_prompt_tokens=800, num_output_tokens=NUM_OUTPUT_TOKENS)
        resident_s = _measure(runner, alone, {}, 1)
        outside_s = resident_s - NUM_LAYERS * _layer_s(device, alone)
        rows = [_row(runner, device, rng, outside_s) for _ in range(options.placements)]
    finally:
        runner.close()
    errors = [abs(row["predicted_s"] - row["measured_s"]) / row["measured_s"] for row in rows]
    document = {
        "definitions": DEFINITIONS,
        "seed": SEED,
        "load": os.getloadavg()[0],
        "outside_s": outside_s,
        "mape": statistics.fmean(errors),
        "worst": max(errors),
        "rows": rows,
    }
    save(document, options.out)
    print(f"MAPE {document['mape']:.1%} over {len(rows)} placements, worst {max(errors):.1%}")


def _case(device: Device) -> EngineCase:
    kv = KVOptions(
        h2d_bytes_per_s=device.link_bytes_per_s,
        restore_when_free_frac=0.0,
    )
    return EngineCase(
        num_blocks=2_500,
        kv=kv,
        layer_time=device.layer_time,
        max_model_len=2_048,
        block_size=BLOCK_SIZE,
    )


def _row(
    runner: StepRunner, device: Device, rng: random.Random, outside_s: float
) -> dict[str, Any]:
    """Measure one random batch in one random placement."""
    workload = [
        Arrival(
            request_id=f"q{number}",
            prompt=make_prompt(rng.randint(*PROMPT_TOKENS), seed=rng.randrange(1 << 30)),
            num_output_tokens=NUM_OUTPUT_TOKENS,
        )
        for number in range(rng.randint(1, MAX_REQUESTS))
    ]
    num_staging = rng.choice((1, 2))
    patterns: dict[str, Pattern] = {}
    for arrival in workload:
        density = rng.random()
        groups = tuple(g for g in range(NUM_LAYERS) if rng.random() < density)
        patterns[arrival.request_id] = make_pattern(groups, num_staging)
    predicted_s = outside_s + _predicted_s(device, workload, patterns)
    return {
        "num_tokens": [_num_tokens(arrival) for arrival in workload],
        "offloaded": [patterns[arrival.request_id].offloaded for arrival in workload],
        "num_staging": num_staging,
        "predicted_s": predicted_s,
        "measured_s": _measure(runner, workload, patterns, num_staging),
    }


def _predicted_s(device: Device, workload: list[Arrival], patterns: dict[str, Pattern]) -> float:
    fetches = [
        Fetch(
            pattern=patterns[arrival.request_id],
            layer_s=_num_tokens(arrival) // BLOCK_SIZE * BLOCK_BYTES / device.link_bytes_per_s,
        )
        for arrival in workload
    ]
    return step_timing([_layer_s(device, workload)] * NUM_LAYERS, fetches).total_s


def _layer_s(device: Device, workload: list[Arrival]) -> float:
    num_context_tokens = sum(_num_tokens(arrival) for arrival in workload)
    return (
        device.layer_s
        + device.per_token_s * len(workload)
        + device.per_context_token_s * num_context_tokens
    )


def _num_tokens(arrival: Arrival) -> int:
    """Return a request's context in the middle of its answer."""
    return len(arrival.prompt) + NUM_OUTPUT_TOKENS // 2


def _measure(
    runner: StepRunner, workload: list[Arrival], patterns: dict[str, Pattern], num_staging: int
) -> float:
    hook = fixed({name: frozenset(p.offloaded) for name, p in patterns.items()}, num_staging)
    return decode_times(runner, workload, hook=hook).wall_s


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/prediction.json"))
    parser.add_argument("--placements", type=int, default=30)
    parser.add_argument("--link-bytes-per-s", type=float, default=300e6)
    return parser.parse_args()


if __name__ == "__main__":
    main()
