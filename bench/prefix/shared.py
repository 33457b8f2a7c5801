"""Requests that begin alike and run at the same time, beside stock vLLM with its prefix cache.

All come at once; a round's prefixes are its own, so that nothing is cached when it begins. The
engines stand side by side and take turns.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bench.document import Benchmark, Row
from bench.layerwise._engines import engines
from bench.prefix.chat import link_ratio, median_of
from lab.engine.step_runner import EXACTNESS, Arrival, EngineCase, StepRunner, make_prompt
from services.control.options import ControllerOptions
from services.executor.kv_options import KVOptions

STOCK = "vLLM, prefix caching"
OURS = "Evenflow, link at memory's pace"
SLOW = "Evenflow, 200 MB/s"
SLOW_BYTES_PER_S = 200e6
NUM_ROUNDS = 3  # after one that warms up
BLOCK_SIZE = 32
MIN_TOKENS_OF_STOCK, MAX_TTFT_OF_STOCK = 0.95, 1.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Prompts that begin alike: all with `shared` tokens, and of each kind with `of_kind` more."""

    title: str
    num_requests: int = 32
    shared: int = 3_000
    num_kinds: int = 1
    of_kind: int = 0
    own: int = 64
    answer: int = 100
    pool_tokens: int = 160 * BLOCK_SIZE

    def workload(self, number: int) -> Iterator[Arrival]:
        """Yield a round's requests, of each kind in turn."""
        seed = 10_000 * (number + 1)
        everybodys = make_prompt(self.shared, seed=seed)
        for n in range(self.num_requests):
            kind = make_prompt(self.of_kind, seed=seed + 1 + n % self.num_kinds)
            own = make_prompt(self.own, seed=seed + 1_000 + n)
            yield Arrival(
                request_id=f"r{number}-{n}",
                prompt=[*everybodys, *kind, *own],
                num_output_tokens=self.answer,
            )


SETTINGS = {
    "shared": Setting(title="32 requests at once with 3,000 shared tokens, 64 own, 100 generated"),
    "kinds": Setting(
        title="the same of four kinds of 700 tokens, in turn",
        shared=0,
        num_kinds=4,
        of_kind=700,
        pool_tokens=4_000,
    ),
    "answers": Setting(
        title="eight prompts of 1,000 tokens, each answered four times",
        shared=0,
        num_kinds=8,
        of_kind=1_000,
        own=1,
        pool_tokens=6_000,
    ),
    "documents": Setting(
        title="64 questions: 256 tokens of all, 736 of one of eight documents, 992 own",
        num_requests=64,
        shared=256,
        num_kinds=8,
        of_kind=736,
        own=992,
        answer=64,
        pool_tokens=16_000,
    ),
}


def one_round(runner: StepRunner, setting: Setting, number: int) -> Row:
    """Run a round's requests to their end."""
    arrived_s: dict[str, float] = {}
    most_at_once = 0
    began_s = time.perf_counter()
    for arrival in setting.workload(number):
        runner.add(arrival)
    while runner.engine.has_unfinished_requests():
        for output in runner.engine.step():
            arrived_s.setdefault(output.request_id, time.perf_counter() - began_s)
        most_at_once = max(most_at_once, len(runner.scheduler.running))
    seconds = time.perf_counter() - began_s
    return {
        "tokens_per_s": setting.num_requests * setting.answer / seconds,
        "ttft_s": statistics.mean(arrived_s.values()),
        "ttft_last_s": max(arrived_s.values()),
        "at_once": most_at_once,
        "lambda": link_ratio(runner),
    }


def cases(setting: Setting) -> dict[str, EngineCase]:
    num_blocks = setting.pool_tokens // BLOCK_SIZE
    longest = setting.shared + setting.of_kind + setting.own + setting.answer
    stock = EngineCase(
        num_blocks=num_blocks + 1,
        block_size=BLOCK_SIZE,
        max_model_len=longest,
        max_num_batched_tokens=2_048,
        max_num_seqs=setting.num_requests,
        prefix_caching=True,
    )
    kv = KVOptions(host_bytes=1 << 30)
    ours = replace(
        stock,
        kv=kv,
        controller=ControllerOptions(policy="evenflow"),
        num_blocks=num_blocks * EXACTNESS.num_layers + 1,
        prefix_caching=False,
    )
    slow = replace(kv, h2d_bytes_per_s=SLOW_BYTES_PER_S, d2h_bytes_per_s=SLOW_BYTES_PER_S)
    return {STOCK: stock, OURS: ours, SLOW: replace(ours, kv=slow)}


def measure(name: str) -> list[Row]:
    setting, rows = SETTINGS[name], list[Row]()
    all_cases = cases(setting)
    with engines(all_cases) as started:
        for number in range(NUM_ROUNDS + 1):
            for engine, process in started.items():
                found = process.measure(one_round, setting, number)
                if number:
                    rows.append({"engine": engine, "round": number, **found})
    return [median_of([row for row in rows if row["engine"] == one]) for one in all_cases]


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = ["engine", "tokens/s", "TTFT mean, s", "last first token, s", "at once", "lambda"]
    return [header] + [
        [
            row["engine"],
            f"{row['tokens_per_s']:.0f}",
            f"{row['ttft_s']:.2f}",
            f"{row['ttft_last_s']:.2f}",
            f"{row['at_once']:.0f}",
            f"{row['lambda']:.0%}" if row["lambda"] else "-",
        ]
        for row in rows
    ]


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return a line for each of ours: what it is of stock vLLM's, and whether the bar is met."""
    stock, *ours = rows
    lines = []
    for row in ours:
        tokens = row["tokens_per_s"] / stock["tokens_per_s"]
        ttft = row["ttft_s"] / stock["ttft_s"]
        met = (
            tokens >= MIN_TOKENS_OF_STOCK
            and ttft <= MAX_TTFT_OF_STOCK
            and row["at_once"] >= stock["at_once"] - 1
        )
        lines.append(
            f"{row['engine']}: {tokens:.2f} x the tokens/s (at least {MIN_TOKENS_OF_STOCK}), "
            f"{ttft:.2f} x the TTFT (at most {MAX_TTFT_OF_STOCK}), {row['at_once']:.0f} for "
            f"{stock['at_once']:.0f} at once: {'met' if met else 'missed'}"
        )
    return lines


def benchmark(name: str) -> Benchmark:
    setting = SETTINGS[name]
    return Benchmark(
        name=name,
        title=f"{setting.title}; a pool of {setting.pool_tokens:,} tokens",
        definitions={
            "tokens/s": "output tokens / time from the first request to the last token",
            "TTFT": "from the moment at which all come",
            "at once": "most requests that run in one step",
            "lambda": "bytes that the link moves in a decode step / bytes of the pool, as measured",
            "rounds": f"medians of {NUM_ROUNDS}, in turn, after one that warms up",
        },
        measure=partial(measure, name),
        table=table,
        verdicts=verdicts,
    )
