"""Agents that wait for their tools, beside stock vLLM with its prefix cache.

Each step's prompt is the last one's, its answer, and what the tool said; it is sent when the tool
is through, a while after the answer's end. The engines stand side by side and take turns; each
round has sessions of its own.
"""

import heapq
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from bench.document import Benchmark, Row
from bench.layerwise._engines import engines
from bench.prefix.bars import OURS, STOCK, of_agents
from bench.prefix.chat import link_ratio, median_of
from bench.tool_agents import ToolAgents
from lab.engine.step_runner import EXACTNESS, Arrival, EngineCase, StepRunner, make_prompt
from services.control.options import ControllerOptions
from services.executor.kv_options import KVOptions
from simulator.sessions import num_known_tokens
from simulator.workload import ArrivingRequest

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    agents: ToolAgents
    num_rounds: int  # after one of `QUICK` that warms up


QUICK = ToolAgents(
    num_sessions=8,
    num_steps=4,
    shared_tokens=512,
    message_tokens=192,
    answer_tokens=32,
    tool_s=(0.1, 3.0),
)
SETTINGS = {
    "agents": Setting(agents=ToolAgents(), num_rounds=3),
    "agents-quick": Setting(agents=QUICK, num_rounds=1),
}


@dataclass
class Session:
    """What was said, and the steps that are to come."""

    seed: int
    tokens: list[int]
    steps: deque[ArrivingRequest]
    due_s: float = 0.0  # when the newest step was to be sent
    first_s: float | None = None  # when its first token came
    ttfts_s: list[float] = field(default_factory=list)

    def send(self, runner: StepRunner, name: str) -> None:
        step = self.steps.popleft()
        num_new = step.num_prompt_tokens - len(self.tokens)
        self.tokens += make_prompt(num_new, seed=self.seed + len(self.steps))
        self.first_s = None
        runner.add(
            Arrival(
                request_id=f"{name}.{len(self.ttfts_s)}",
                prompt=list(self.tokens),
                num_output_tokens=step.num_output_tokens,
            )
        )


@contextmanager
def counting_computed(runner: StepRunner) -> Iterator[list[int]]:
    """Yield the tokens that each step computes, as they are scheduled."""
    scheduler, computed = runner.scheduler, list[int]()
    schedule = scheduler.schedule

    def counted(*args, **kwargs):
        output = schedule(*args, **kwargs)
        computed.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counted
    try:
        yield computed
    finally:
        scheduler.schedule = schedule


def sessions_of(agents: ToolAgents, number: int) -> dict[str, Session]:
    """Return a round's sessions by name."""
    seed = 1_000_000 * (number + 1)
    everybodys = make_prompt(agents.shared_tokens, seed=seed)
    made: dict[str, Session] = {}
    for step in agents.steps(number):
        name = f"{number}-{step.conversation}"
        if name not in made:
            made[name] = Session(
                seed=seed + 1_000 * (len(made) + 1), tokens=list(everybodys), steps=deque()
            )
        made[name].steps.append(step)
    return made


def one_round(runner: StepRunner, agents: ToolAgents, number: int) -> Row:
    """Run a round's sessions to their end."""
    sessions = sessions_of(agents, number)
    coming = [(one.steps[0].arrival_s, name) for name, one in sessions.items()]
    heapq.heapify(coming)
    began_s, last_s = time.perf_counter(), 0.0
    with counting_computed(runner) as computed:
        while coming or runner.engine.has_unfinished_requests():
            if not runner.engine.has_unfinished_requests():
                time.sleep(max(0.0, coming[0][0] - (time.perf_counter() - began_s)))
            while coming and coming[0][0] <= time.perf_counter() - began_s:
                due_s, name = heapq.heappop(coming)
                sessions[name].due_s = due_s
                sessions[name].send(runner, name)
            for output in runner.engine.step():
                last_s = time.perf_counter() - began_s
                name = output.request_id.partition(".")[0]
                session = sessions[name]
                if session.first_s is None:
                    session.first_s = last_s
                    session.ttfts_s.append(last_s - session.due_s)
                if output.finished:
                    session.tokens += output.outputs[0].token_ids
                    if session.steps:
                        coming_s = last_s + session.steps[0].wait_s
                        heapq.heappush(coming, (coming_s, name))
    steps = agents.steps(number)
    known = num_known_tokens(steps, BLOCK_SIZE)
    num_needed = sum(one.num_prompt_tokens + one.num_output_tokens - 1 for one in steps)
    next_s = sorted(ttft_s for one in sessions.values() for ttft_s in one.ttfts_s[1:])
    return {
        "next_ttft_p50_s": statistics.median(next_s),
        "next_ttft_p95_s": next_s[int(0.95 * (len(next_s) - 1))],
        "tokens_per_s": sum(one.num_output_tokens for one in steps) / last_s,
        "recomputed_tokens": sum(computed) - (num_needed - sum(known.values())),
        "lambda": link_ratio(runner),
    }


def cases(agents: ToolAgents) -> dict[str, EngineCase]:
    num_blocks = agents.third_tokens // BLOCK_SIZE
    stock = EngineCase(
        num_blocks=num_blocks + 1,
        block_size=BLOCK_SIZE,
        max_model_len=agents.longest_tokens,
        max_num_batched_tokens=2_048,
        max_num_seqs=agents.num_sessions,
        prefix_caching=True,
    )
    ours = replace(
        stock,
        kv=KVOptions(host_bytes=1 << 30),
        controller=ControllerOptions(policy="evenflow"),
        num_blocks=num_blocks * EXACTNESS.num_layers + 1,
        prefix_caching=False,
    )
    return {STOCK: stock, OURS: ours}


def measure(name: str) -> list[Row]:
    setting, rows = SETTINGS[name], list[Row]()
    all_cases = cases(setting.agents)
    with engines(all_cases) as started:
        for process in started.values():  # rates are measured, memory is touched
            process.measure(one_round, QUICK, 0)
        for number in range(1, 1 + setting.num_rounds):
            for engine, process in started.items():
                found = process.measure(one_round, setting.agents, number)
                rows.append({"engine": engine, "round": number, **found})
    return [median_of([row for row in rows if row["engine"] == one]) for one in all_cases]


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = [
        "engine", "next TTFT P50 (ms)", "P95 (ms)", "tokens/s", "recomputed", "lambda",
    ]  # fmt: skip
    return [header] + [
        [
            row["engine"],
            f"{1e3 * row['next_ttft_p50_s']:.0f}",
            f"{1e3 * row['next_ttft_p95_s']:.0f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['recomputed_tokens']:,.0f}",
            f"{row['lambda']:.0%}" if row["lambda"] else "-",
        ]
        for row in rows
    ]


def benchmark(name: str) -> Benchmark:
    setting = SETTINGS[name]
    return Benchmark(
        name=name,
        title=f"{setting.agents.title}; a pool of {setting.agents.third_tokens:,} tokens, a third",
        definitions={
            "next TTFT": "of steps that follow another: from the moment at which the tool is "
            "through to the first token",
            "tokens/s": "output tokens / time from the beginning to the last token, tools included",
            "recomputed": "tokens that steps computed and a cache without end would have had",
            "lambda": "bytes that the link moves in a decode step / bytes of the pool, as measured",
            "rounds": f"medians of {setting.num_rounds}, in turn, after a short one that warms up",
        },
        measure=partial(measure, name),
        table=table,
        verdicts=of_agents,
    )
