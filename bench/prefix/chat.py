"""Multi-turn chat: what a cache of prefixes is worth where histories fit the pool, and where not.

Conversations run side by side; each sends its next message when its answer is complete. A turn's
prompt is the last one's, its answer and the message. The engines stand side by side and take
turns; each round has conversations of its own.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bench.document import Benchmark, Row
from bench.layerwise._engines import engines
from bench.prefix.bars import OURS, STOCK, UNCACHED, of_windows, verdicts
from demo.model import demo_model
from lab.engine.step_runner import EXACTNESS, Arrival, EngineCase, Model, StepRunner, make_prompt
from lab.kind_models import kind_model
from services.executor.kv_options import KVOptions
from services.pacing.attainment import DELIVERY_TOLERANCE_S

NUM_CONVERSATIONS = 8
NUM_TURNS = 10
FIRST_TOKENS, MESSAGE_TOKENS, ANSWER_TOKENS = 200, 60, 40
HISTORY_TOKENS = FIRST_TOKENS + NUM_TURNS * ANSWER_TOKENS + (NUM_TURNS - 1) * MESSAGE_TOKENS
READER_TPS = 10.0
BLOCK_SIZE = 32  # the least on a CPU
TINY = EXACTNESS
REAL = Model(directory=demo_model, num_layers=30)  # SmolLM2-135M
# Shaped as gpt-oss: of eight layers four keep a window, and never leave.
WINDOWS = Model(directory=partial(kind_model, "gpt_oss"), num_layers=4)
TITLES = {
    TINY: "the exactness model",
    REAL: "SmolLM2-135M",
    WINDOWS: "a gpt-oss-shaped model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured."""

    pool_tokens: int
    model: Model
    num_rounds: int  # after one that warms up
    num_warm_turns: int = NUM_TURNS

    @property
    def fits(self) -> bool:
        """Say whether the pool holds all histories in the end; of stock vLLM windows', too."""
        of_windows = 2 if self.has_windows else 1
        return self.pool_tokens >= of_windows * NUM_CONVERSATIONS * HISTORY_TOKENS

    @property
    def has_windows(self) -> bool:
        return self.model is WINDOWS


SETTINGS = {
    "fits": Setting(pool_tokens=9_600, model=TINY, num_rounds=3),
    "third": Setting(pool_tokens=3_200, model=TINY, num_rounds=3),
    "fits-135m": Setting(pool_tokens=9_600, model=REAL, num_rounds=2, num_warm_turns=2),
    "third-135m": Setting(pool_tokens=3_200, model=REAL, num_rounds=2, num_warm_turns=2),
    "fits-windows": Setting(pool_tokens=19_200, model=WINDOWS, num_rounds=3),
    "third-windows": Setting(pool_tokens=6_400, model=WINDOWS, num_rounds=3),
}


@dataclass
class Conversation:
    """One conversation: what was said, and when the newest turn's tokens came."""

    name: str
    seed: int
    turn: int = 0
    tokens: list[int] = field(default_factory=list)
    sent_s: float = 0.0
    sent_cpu_s: float = 0.0  # of the engine's process, all its threads
    first_cpu_s: float = 0.0
    arrived_s: list[float] = field(default_factory=list)

    def next_turn(self, runner: StepRunner) -> None:
        message = make_prompt(
            MESSAGE_TOKENS if self.turn else FIRST_TOKENS, seed=100 * self.seed + self.turn
        )
        self.tokens += message
        self.turn += 1
        self.arrived_s = []
        self.sent_s, self.sent_cpu_s = time.perf_counter(), time.process_time()
        runner.add(
            Arrival(
                request_id=f"{self.name}.{self.turn}",
                prompt=list(self.tokens),
                num_output_tokens=ANSWER_TOKENS,
            )
        )


def one_round(runner: StepRunner, number: int, num_turns: int = NUM_TURNS) -> Row:
    """Run all conversations for so many turns."""
    conversations = {
        f"c{number}-{n}": Conversation(f"c{number}-{n}", seed=1 + number * NUM_CONVERSATIONS + n)
        for n in range(NUM_CONVERSATIONS)
    }
    ttfts_s: dict[int, list[float]] = {turn: [] for turn in range(1, num_turns + 1)}
    last_cpus_s: list[float] = []
    in_time: list[float] = []
    num_cached = 0
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for conversation in conversations.values():
        conversation.next_turn(runner)
    while runner.engine.has_unfinished_requests():
        for output in runner.engine.step():
            now_s = time.perf_counter()
            conversation = conversations[output.request_id.split(".")[0]]
            tokens = output.outputs[0].token_ids
            if not conversation.arrived_s:
                conversation.first_cpu_s = time.process_time() - conversation.sent_cpu_s
            conversation.arrived_s += [now_s] * (len(tokens) - len(conversation.arrived_s))
            if output.finished:
                ttfts_s[conversation.turn].append(conversation.arrived_s[0] - conversation.sent_s)
                if conversation.turn == num_turns:
                    last_cpus_s.append(conversation.first_cpu_s)
                in_time.append(in_time_frac(conversation.arrived_s))
                num_cached += output.num_cached_tokens or 0
                conversation.tokens += tokens
                if conversation.turn < num_turns:
                    conversation.next_turn(runner)
    seconds = time.perf_counter() - began_s
    num_tokens = NUM_CONVERSATIONS * num_turns * ANSWER_TOKENS
    everything = sorted(ttft_s for turn in ttfts_s.values() for ttft_s in turn)
    return {
        "first_ttft_s": statistics.median(ttfts_s[1]),
        "last_ttft_s": statistics.median(ttfts_s[num_turns]),
        "ttft_p50_s": statistics.median(everything),
        "ttft_p99_s": everything[int(0.99 * (len(everything) - 1))],
        "cached_tokens": num_cached,
        "in_time_frac": statistics.mean(in_time),
        "tokens_per_s": num_tokens / seconds,
        "lambda": link_ratio(runner),
        "last_cpu_s": statistics.median(last_cpus_s),
        "tokens_per_cpu_s": num_tokens / (time.process_time() - began_cpu_s),
    }


def link_ratio(runner: StepRunner) -> float:
    """Return what the link moves in a decode step / the pool, as measured; 0: by stock vLLM."""
    if runner.case.kv is None:
        return 0.0
    rates, owner = runner.scheduler.loop.meter.rates(), runner.scheduler.block_owner
    pool_bytes = owner.pool.num_gpu_blocks * runner.scheduler.control.resumes.block_bytes
    return float((rates.h2d_bytes_per_s or 0.0) * (rates.step_s or 0.0) / pool_bytes)


def in_time_frac(arrived_s: Sequence[float]) -> float:
    """Return the share of tokens that came before their reader wanted them."""
    due_s = (arrived_s[0] + n / READER_TPS + DELIVERY_TOLERANCE_S for n in range(len(arrived_s)))
    return statistics.mean(a <= due for a, due in zip(arrived_s, due_s, strict=True))


def cases(setting: Setting) -> dict[str, EngineCase]:
    num_blocks = setting.pool_tokens // BLOCK_SIZE
    stock = EngineCase(
        num_blocks=num_blocks + 1,
        model=setting.model,
        block_size=BLOCK_SIZE,
        max_model_len=2_048,
        max_num_batched_tokens=512,
        prefix_caching=True,
    )
    kv = KVOptions(host_bytes=1 << 30)
    ours = replace(
        stock, kv=kv, num_blocks=num_blocks * setting.model.num_layers + 1, prefix_caching=False
    )
    return {
        OURS: ours,
        UNCACHED: replace(ours, kv=replace(kv, prefix_caching=False)),
        STOCK: stock,
    }


def measure(name: str) -> list[Row]:
    """Measure the rounds that no earlier call has; they are kept, and given with the others."""
    setting = SETTINGS[name]
    kept = Path(f".cache/bench/prefix-{name}-{_commit()}.jsonl")
    kept.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(row["engine"], row["round"]) for row in rows}
    rounds, all_cases = range(1, 1 + setting.num_rounds), cases(setting)
    missing = [n for n in rounds if any((engine, n) not in done for engine in all_cases)]
    with engines(all_cases if missing else {}) as started:
        for process in started.values():  # rates are measured, memory is touched
            process.measure(one_round, 0, setting.num_warm_turns)
        for number in missing:
            for engine, process in started.items():
                if (engine, number) in done:
                    continue
                row = {"engine": engine, "round": number, **process.measure(one_round, number)}
                print(row, file=sys.stderr, flush=True)
                rows.append(row)
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return [median_of([row for row in rows if row["engine"] == engine]) for engine in all_cases]


def median_of(rows: Sequence[Row]) -> Row:
    figures = [name for name in rows[0] if name not in ("engine", "round")]
    return {
        "engine": rows[0]["engine"],
        **{name: statistics.median(row[name] for row in rows) for name in figures},
    }


def _commit() -> str:
    return subprocess.check_output(["git", "describe", "--always"], text=True).strip()


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = [
        "engine", "first turn (ms)", "last turn (ms)", "its CPU (ms)", "TTFT P50 (ms)",
        "TTFT P99 (ms)", "cached tokens", "in time", "tokens/s", "tokens/CPU s", "lambda",
    ]  # fmt: skip
    times = ("first_ttft_s", "last_ttft_s", "last_cpu_s", "ttft_p50_s", "ttft_p99_s")
    return [header] + [
        [
            row["engine"],
            *(f"{1e3 * row[name]:.0f}" for name in times),
            f"{row['cached_tokens']:,.0f}",
            f"{row['in_time_frac']:.0%}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['tokens_per_cpu_s']:.0f}",
            f"{row['lambda']:.0%}" if row["lambda"] else "-",
        ]
        for row in rows
    ]


def benchmark(name: str) -> Benchmark:
    setting = SETTINGS[name]
    model = TITLES[setting.model]
    return Benchmark(
        name=name,
        title=f"Ten turns of eight conversations, {model}, a pool of {setting.pool_tokens} tokens",
        definitions={
            "histories": f"{NUM_CONVERSATIONS} x {HISTORY_TOKENS:,} tokens in the end",
            "first turn, last turn": "median time to the first token of the conversations' first "
            "and tenth answer",
            "cached tokens": "of all prompts, those that were not computed again",
            "in time": f"share of tokens that came before a reader of {READER_TPS:g} tokens/s, who "
            "begins with the first one, wanted them; mean over answers",
            "its CPU, tokens/CPU s": "the same by processor time of the engine's process, copies "
            "included: work beside the engine disturbs it less",
            "tokens/s": "output tokens / time from the first message to the last token",
            "lambda": "bytes that the link moves in a decode step / bytes of the pool, as measured",
            "rounds": f"medians of {setting.num_rounds}, after one that warms up",
        },
        measure=partial(measure, name),
        table=table,
        verdicts=partial(of_windows if setting.has_windows else verdicts, fits=setting.fits),
    )
