"""Whether copies hide behind layers as far as they can.

From a run with everything resident: when each layer asks for its KV and when it has read it. From
the link: the time of a copy. The longest path through both, with one copy queue and the staging
buffers' turns, is what a decode step should take; it is compared with what a step takes. All of it
in one engine, whose link changes speed between runs.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from bench.document import Benchmark, Row
from bench.layerwise._common import all_decode, batch, median_of
from bench.layerwise._engines import engines
from lab.engine.link import h2d_link
from lab.engine.step_runner import EngineCase, Hook, StepRunner
from lab.engine.workloads import every, fixed
from lab.models import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS
from services.executor.copies.device.cpu_device import LinkModel
from services.executor.kv_options import KVOptions

NUM_REQUESTS = 4
NUM_PROMPT_TOKENS = 900
NUM_OUTPUT_TOKENS = 30
NUM_WARM_STEPS = 5
NUM_ROUNDS = 3
BLOCK_SIZE = 32
BLOCK_BYTES = BLOCK_SIZE * 2 * NUM_KV_HEADS * HEAD_DIM * 4  # of one layer: K and V, fp32
LINKS_BYTES_PER_S = {"0.2 GB/s": 2e8, "1 GB/s": 1e9, "4 GB/s": 4e9}
DISTANCES = (1, 2, 4)
DEFINITIONS = {
    "compute": "decode step with everything resident",
    "copies": "time that the link takes for the step's bytes",
    "predicted": "longest path: layer l begins at max(end of layer l-1, end of the copies it "
    "needs), a copy at max(link free, staging buffer free)",
    "ratio": "measured / predicted",
    "measured": f"decode step; median of a round's steps, median of {NUM_ROUNDS} rounds, each "
    "predicted from a resident run of the same round",
    "requests": f"{NUM_REQUESTS} of {NUM_PROMPT_TOKENS} prompt tokens, {NUM_LAYERS} layers, one "
    "layer per group",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Median times of a decode step with everything resident, seconds from its begin."""

    step_s: float
    asks_s: tuple[float, ...]  # per layer: it asks for its KV
    has_read_s: tuple[float, ...]  # per layer: its KV may be overwritten


def critical_path(profile: Profile, copy_s: float, offloaded: list[int], num_staging: int) -> float:
    """Return a step's time. `copy_s`: one layer's blocks of all requests.

    Copies run in the order of need, each when its buffer is free; the first ones begin with the
    first layer's preparation, when the step's orders arrive.
    """
    has_read: dict[int, float] = {}
    link_free = late = 0.0
    for layer in range(NUM_LAYERS):
        begin = profile.asks_s[layer] + late
        if layer in offloaded:
            turn = offloaded.index(layer) - num_staging
            buffer_free = has_read[offloaded[turn]] if turn >= 0 else 0.0
            link_free = max(link_free, buffer_free) + copy_s
            late += max(0.0, link_free - begin)
        has_read[layer] = profile.has_read_s[layer] + late
    return profile.step_s + late


def measure() -> list[Row]:
    options = KVOptions(restore_when_free_frac=0.0)
    case = EngineCase(num_blocks=2_000, kv=options, max_num_batched_tokens=4_096)
    with engines({"engine": case}) as started:
        rounds = [started["engine"].measure(one_round) for _ in range(NUM_ROUNDS)]
    return [
        {
            **{key: rows[0][key] for key in ("link", "distance", "num_staging", "copy_s")},
            **{key: median_of(rows, key) for key in ("compute_s", "predicted_s", "measured_s")},
            "ratio": median_of(rows, "ratio"),
        }
        for rows in zip(*rounds, strict=True)
    ]


def one_round(runner: StepRunner) -> list[Row]:
    profile = decode_profile(runner, None)
    rows = []
    for name, bytes_per_s in LINKS_BYTES_PER_S.items():
        num_blocks = NUM_REQUESTS * ((NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS // 2) // BLOCK_SIZE)
        copy_s = num_blocks * BLOCK_BYTES / bytes_per_s
        with h2d_link(LinkModel(bytes_per_s=bytes_per_s)):
            for distance in DISTANCES:
                for num_staging in (1, 2):
                    groups = every(distance, NUM_LAYERS)
                    hook = fixed({f"q{n}": groups for n in range(NUM_REQUESTS)}, num_staging)
                    measured = decode_profile(runner, hook).step_s
                    predicted = critical_path(profile, copy_s, sorted(groups), num_staging)
                    rows.append(
                        {
                            "link": name,
                            "distance": distance,
                            "num_staging": num_staging,
                            "copy_s": copy_s * len(groups),
                            "compute_s": profile.step_s,
                            "predicted_s": predicted,
                            "measured_s": measured,
                            "ratio": measured / predicted,
                        }
                    )
    return rows


def decode_profile(runner: StepRunner, hook: Hook | None) -> Profile:
    """Run the workload; return the medians of the steps in which all of it decodes."""
    workload = batch(
        NUM_REQUESTS, num_prompt_tokens=NUM_PROMPT_TOKENS, num_output_tokens=NUM_OUTPUT_TOKENS
    )
    connector: Any = get_kv_transfer_group()
    step: Callable[..., Any] = runner.engine.step
    steps: list[tuple[float, list[float], list[float]]] = []

    def timed() -> Any:
        for times in (orders, asks, has_read):
            times.clear()
        begin = time.perf_counter()
        outputs = step()
        seconds = time.perf_counter() - begin
        if all_decode(runner, NUM_REQUESTS):
            origin = orders[0]
            steps.append((seconds, [t - origin for t in asks], [t - origin for t in has_read]))
        return outputs

    runner.engine.step = timed
    connector.watches_layers = True
    try:
        with (
            _calls("start_load_kv") as orders,
            _calls("wait_for_layer_load") as asks,
            _calls("save_kv_layer") as has_read,
        ):
            runner.run(workload, hook=hook, check=False)
    finally:
        del runner.engine.step
        connector.watches_layers = False
    seconds, asked, read = zip(*steps[NUM_WARM_STEPS:], strict=True)
    return Profile(
        step_s=statistics.median(seconds),
        asks_s=tuple(map(statistics.median, zip(*asked, strict=True))),
        has_read_s=tuple(map(statistics.median, zip(*read, strict=True))),
    )


@contextmanager
def _calls(name: str) -> Iterator[list[float]]:
    """Collect when a method of the connector is called."""
    connector = get_kv_transfer_group()
    method = getattr(connector, name)
    times: list[float] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        times.append(time.perf_counter())
        return method(*args, **kwargs)

    setattr(connector, name, noted)
    try:
        yield times
    finally:
        delattr(connector, name)


def table(rows: Sequence[Row]) -> list[list[str]]:
    names = ("compute", "copies", "predicted", "measured")
    lines = [["link", "distance", "buffers", *(f"{name} ms" for name in names), "ratio"]]
    for row in rows:
        times = (row[name] * 1e3 for name in ("compute_s", "copy_s", "predicted_s", "measured_s"))
        lines.append(
            [
                row["link"],
                str(row["distance"]),
                str(row["num_staging"]),
                *(f"{value:.1f}" for value in times),
                f"{row['ratio']:.2f}",
            ]
        )
    return lines


BENCHMARK = Benchmark(
    name="overlap",
    title="Copies behind layers",
    definitions=DEFINITIONS,
    measure=measure,
    table=table,
)
