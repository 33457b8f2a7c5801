"""`python -m bench.e2e.windows [NAME ...]`: a model with windows, on an emulated device.

Of the gpt-oss-shaped model's layers every other one keeps a window, and never leaves. `readers`:
Evenflow in turn with stock vLLM, eight layers. `long`: an answer behind a prompt that the pool
cannot hold, beside one behind a prompt that fits, as many layers as gpt-oss-120b has.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import median

from bench.document import Benchmark, measure_named
from bench.document import Row as Figures
from bench.e2e.reading.figures import DEFINITIONS, Run, RunKey, rows_of, table, verdicts
from bench.e2e.reading.rows import Place, Row
from bench.e2e.reading.running import Engines
from bench.e2e.records import RequestRecord
from bench.e2e.stack import planner
from bench.e2e.systems import BLOCK_BYTES, BLOCK_SIZE, NUM_LAYERS, SYSTEMS, Device, is_resident
from bench.e2e.trace import TracedRequest
from lab.executor_client import MODEL
from lab.kind_models import WINDOW, kind_model

NUM_ALIKE = NUM_LAYERS // 2  # layers with a window, and as many without
NUM_ALIKE_LONG = 18
LAMBDA = 0.2
RATE_TPS = 6.0  # of people
COMPARED, SEEDS = ("vllm", "evenflow"), (1, 2, 3)
SMALL_POOL_TOKENS, LONG_ANSWER = 1_440, 80
POOLS = {"fits": 0.8, "does not fit": 1.3}  # the prompt's length, in pools
LEAST_STEP_RATE = 0.4  # behind a prompt that does not fit, of one that fits
WINDOW_BLOCKS = WINDOW // BLOCK_SIZE + 1  # that a request has at most in a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class OfWindows(Place):
    """The device, as fast as it is; its pool holds so many tokens of the layers that may leave."""

    num_requests: int = 120

    @property
    def rate_tps(self) -> float:
        return RATE_TPS

    @property
    def pool_bytes(self) -> int:
        return pool_bytes(self.room.pool_tokens, int(self.capacity.num_held))

    def device(self, link_frac: float) -> Device:
        return replace(self.room, link_bytes_per_s=link_frac * self.pool_bytes / self.step_s)


def pool_bytes(num_tokens: int, num_requests: int, num_alike: int = NUM_ALIKE) -> int:
    """Return what so many tokens take, and the windows of so many requests."""
    num_blocks = num_tokens // BLOCK_SIZE + num_requests * WINDOW_BLOCKS
    return num_alike * num_blocks * BLOCK_BYTES


@contextmanager
def started() -> Iterator[tuple[Engines, OfWindows]]:
    """Yield what starts engines, and the device that they were measured on."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        with planner(folder / "planner.log") as address:
            more = {
                "MODEL": kind_model("gpt_oss"),
                "SERVED_MODEL_NAME": MODEL,
                "KV_CACHE_MEMORY_BYTES": OfWindows(outside_s=0.0).pool_bytes,
            }
            engines = Engines(planner_address=address, folder=folder, more=more)
            yield engines, OfWindows(outside_s=engines.outside_s())


def deep_model(folder: Path) -> Path:
    """Write the model with as many layers as `long` has, without weights."""
    directory = folder / "deep"
    directory.mkdir()
    for path in kind_model("gpt_oss").iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, directory)
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] = 2 * NUM_ALIKE_LONG
    config["layer_types"] = ["sliding_attention", "full_attention"] * NUM_ALIKE_LONG
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def measure_readers() -> list[Figures]:
    runs = list[Run]()
    with started() as (engines, place):
        for seed, system in product(SEEDS, COMPARED):
            link_frac = 0.0 if is_resident(system) else LAMBDA
            key = RunKey(row=Row.STEADY, system=system, seed=seed, link_frac=link_frac)
            device = place.device(link_frac) if link_frac else place.room
            trace = place.trace(key.row, key.seed)
            runs.append(
                engines.run(key, device, SYSTEMS[system], warm_up=place.warm_up(), trace=trace)
            )
    return rows_of(runs)


def measure_long() -> list[Figures]:
    with started() as (engines, place):
        layer_s = place.room.layer_time.of_step(num_tokens=1, num_context_tokens=SMALL_POOL_TOKENS)
        step_s = 2 * NUM_ALIKE_LONG * layer_s + place.outside_s
        num_bytes = pool_bytes(SMALL_POOL_TOKENS, 1, NUM_ALIKE_LONG)
        device = replace(place.room, link_bytes_per_s=LAMBDA * num_bytes / step_s)
        more = {
            "MODEL": deep_model(engines.folder),
            "ENGINE_ARGS": json.dumps(["--load-format", "dummy"]),
            "KV_CACHE_MEMORY_BYTES": num_bytes,
        }
        engines = replace(engines, more={**engines.more, **more})
        answers: dict[str, list[RequestRecord]] = {what: [] for what in POOLS}
        for seed, what in product(SEEDS, POOLS):
            key = RunKey(row=Row.STEADY, system="evenflow", seed=seed, link_frac=LAMBDA)
            asked = TracedRequest(
                request_id=f"{what}-{seed}",
                arrival_s=0.0,
                num_prompt_tokens=int(POOLS[what] * SMALL_POOL_TOKENS),
                num_output_tokens=LONG_ANSWER,
            )
            warm_up = [replace(asked, request_id="warm")]
            run = engines.run(key, device, SYSTEMS["evenflow"], warm_up=warm_up, trace=[asked])
            answers[what] += run.requests
    return [
        {
            "prompt": what,
            "prompt_tokens": int(pools * SMALL_POOL_TOKENS),
            "step_s": median(gap_s for one in answers[what] for gap_s in _gaps_s(one)),
            "lambda": LAMBDA,
        }
        for what, pools in POOLS.items()
    ]


def _gaps_s(answer: RequestRecord) -> list[float]:
    return [after - before for before, after in pairwise(answer.generated_s)]


def table_of_long(rows: Sequence[Figures]) -> list[list[str]]:
    return [
        ["a prompt that", "tokens", "step, ms", "of the step rate of one that fits", "lambda"],
        *(
            [
                row["prompt"],
                f"{row['prompt_tokens']:,}",
                f"{1e3 * row['step_s']:.0f}",
                f"{rows[0]['step_s'] / row['step_s']:.2f}",
                f"{row['lambda']:.0%}",
            ]
            for row in rows
        ),
    ]


def verdicts_of_long(rows: Sequence[Figures]) -> list[str]:
    fits, beyond = rows
    frac = fits["step_s"] / beyond["step_s"]
    return [f"step rate behind a prompt that does not fit: {frac:.2f} (bar {LEAST_STEP_RATE})"]


BENCHMARKS = (
    Benchmark(
        name="readers",
        title=f"A gpt-oss-shaped model of {NUM_LAYERS} layers, "
        f"readers of {RATE_TPS:g} tokens/s at load 1",
        definitions=DEFINITIONS,
        measure=measure_readers,
        table=table,
        verdicts=verdicts,
    ),
    Benchmark(
        name="long",
        title=f"A gpt-oss-shaped model of {2 * NUM_ALIKE_LONG} layers, "
        f"one answer, a pool of {SMALL_POOL_TOKENS:,} tokens",
        definitions={
            "step": f"median time between two tokens of an answer of {LONG_ANSWER}, over "
            f"{len(SEEDS)} answers, each by an engine of its own",
            "lambda": "what the link carries in a step of a full pool / what the pool holds",
        },
        measure=measure_long,
        table=table_of_long,
        verdicts=verdicts_of_long,
    ),
)

if __name__ == "__main__":
    measure_named(
        {one.name: lambda one=one: one for one in BENCHMARKS},  # type: ignore[misc]
        prefix="e2e-windows",
        description=__doc__,
    )
