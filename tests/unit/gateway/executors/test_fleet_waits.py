"""Two gateways before three executors of unequal speed and context, in virtual time.

An executor computes one prompt after the other, and tells each gateway its load four times a
second. What requests wait is set beside one queue that sees all, from which a free executor
takes the first request that fits, the fastest first.
"""

import heapq
import itertools
import random
from dataclasses import dataclass, field
from functools import cache

import pytest

from services.executor.serving.load import Newcomers
from services.gateway.executors.routing import Candidate, Wanted, choose_executor
from services.reporting.load import ExecutorLoad

TPS = 4_000.0  # of prompts, at speed 1
REPORT_S = 0.25
MODELS = frozenset({"m"})
SPEEDS_AND_CONTEXTS = ((1, 4_096), (1, 4_096), (2, 32_768))
NUM_ARRIVALS, LONG_SHARE = 2_000, 0.05


@dataclass(frozen=True)
class Arrival:
    at_s: float
    num_tokens: int
    gateway: int
    conversation: bytes = b""


@cache
def arrivals(load: float, num_conversations: int = 0) -> tuple[Arrival, ...]:
    """Return what was drawn once, by seed: independent arrivals of which one in 20 is long."""
    rng = random.Random(7)
    lengths = [
        rng.randint(5_000, 20_000)
        if rng.random() < LONG_SHARE and not num_conversations
        else min(4_000, max(50, int(rng.lognormvariate(6.2, 1.0))))
        for _ in range(NUM_ARRIVALS)
    ]
    mean_s = sum(lengths) / NUM_ARRIVALS / (TPS * sum(speed for speed, _ in SPEEDS_AND_CONTEXTS))
    drawn, now_s = [], 0.0
    for length in lengths:
        now_s += rng.expovariate(load / mean_s)
        conversation = b"%d" % rng.randrange(num_conversations) if num_conversations else b""
        drawn.append(Arrival(now_s, length, rng.randrange(2), conversation))
    return tuple(drawn)


@dataclass
class Executor:
    name: str
    speed: int
    context: int
    newcomers: Newcomers
    told: ExecutorLoad = field(default_factory=ExecutorLoad)
    unreported: list[list[int]] = field(default_factory=lambda: [[], []])  # of each gateway
    waiting: list[Arrival] = field(default_factory=list)
    busy_with: Arrival | None = None

    def report(self) -> None:
        self.told = ExecutorLoad(
            num_newcomers=self.newcomers.num_reqs,
            num_newcomer_tokens=self.newcomers.num_tokens,
            prefill_tps=self.newcomers.prefill_tps,
        )
        self.unreported = [[], []]

    def seen_by(self, gateway: int, *, caches: bool) -> Candidate:
        return Candidate(
            address=self.name,
            models=MODELS,
            max_model_len=self.context,
            num_inflight=0,
            load=self.told,
            num_unreported_tokens=sum(self.unreported[gateway]),
            caches_prefixes=caches,
        )


class Fleet:
    """Routes arrivals, and notes where they went and when their first tokens came."""

    def __init__(self, asked: tuple[Arrival, ...]) -> None:
        self.now_s = 0.0
        self.executors = [
            Executor(f"e{k}", speed, context, Newcomers(lambda: self.now_s))
            for k, (speed, context) in enumerate(SPEEDS_AND_CONTEXTS)
        ]
        self.went: list[tuple[Arrival, Executor]] = []
        self.first_tokens_s: list[float] = []
        self._rngs = [random.Random(1), random.Random(2)]
        self._caches = bool(asked[0].conversation)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, object]] = []
        for arrival in asked:
            self._at(arrival.at_s, arrival)
        for number in range(int(asked[-1].at_s / REPORT_S)):
            for k, executor in enumerate(self.executors):
                self._at((number + k / 3) * REPORT_S, executor.report)

    def _at(self, at_s: float, what: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), what))

    def run(self) -> None:
        while self._events:
            self.now_s, _, what = heapq.heappop(self._events)
            if isinstance(what, Arrival):
                self._route(what)
            elif callable(what):
                what()

    def _route(self, arrival: Arrival) -> None:
        seen = [one.seen_by(arrival.gateway, caches=self._caches) for one in self.executors]
        wanted = Wanted(
            model="m",
            num_prompt_tokens=arrival.num_tokens,
            fits=lambda length: arrival.num_tokens < length,
            conversation=arrival.conversation,
            turn=len(self.went),
        )
        chosen = choose_executor(seen, wanted, self._rngs[arrival.gateway])
        executor = self.executors[int(chosen.address[1:])]
        self.went.append((arrival, executor))
        executor.unreported[arrival.gateway].append(arrival.num_tokens)
        executor.newcomers.came(arrival.num_tokens)
        executor.waiting.append(arrival)
        self._next(executor)

    def _next(self, executor: Executor) -> None:
        if executor.busy_with is None and executor.waiting:
            executor.busy_with = executor.waiting.pop(0)
            took_s = executor.busy_with.num_tokens / TPS / executor.speed
            self._at(self.now_s + took_s, lambda: self._done(executor))

    def _done(self, executor: Executor) -> None:
        done, executor.busy_with = executor.busy_with, None
        assert done is not None
        executor.newcomers.served(done.num_tokens)
        self.first_tokens_s.append(self.now_s - done.at_s)
        self._next(executor)


def waits_of_one_queue(asked: tuple[Arrival, ...]) -> list[float]:
    """Return when first tokens come from one queue that sees all, in s after each arrival."""
    executors = sorted(SPEEDS_AND_CONTEXTS, key=lambda one: -one[0])
    free_s, waiting, left, waits_s = [0.0] * len(executors), [], list(asked), []
    now_s = 0.0
    while left or waiting:
        while left and left[0].at_s <= now_s:
            waiting.append(left.pop(0))
        for k, (speed, context) in enumerate(executors):
            fitting = [one for one in waiting if one.num_tokens < context]
            if free_s[k] <= now_s and fitting:
                waiting.remove(fitting[0])
                free_s[k] = now_s + fitting[0].num_tokens / TPS / speed
                waits_s.append(free_s[k] - fitting[0].at_s)
        later = [at_s for at_s in free_s if at_s > now_s] + [one.at_s for one in left[:1]]
        now_s = min(later, default=now_s)
    return waits_s


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


@pytest.mark.parametrize("load", [0.5, 0.7, 0.85])
def test_requests_wait_hardly_longer_than_in_one_queue_that_sees_all(load: float) -> None:
    asked = arrivals(load)
    fleet = Fleet(asked)
    fleet.run()

    assert len(fleet.first_tokens_s) == NUM_ARRIVALS
    assert p95(fleet.first_tokens_s) <= 1.2 * p95(waits_of_one_queue(asked))
    assert all(arrival.num_tokens < executor.context for arrival, executor in fleet.went)


def test_conversations_stay_home_while_loads_are_even() -> None:
    asked = arrivals(0.5, num_conversations=100)
    fleet = Fleet(asked)
    fleet.run()
    turns: dict[bytes, list[str]] = {}
    for arrival, executor in fleet.went:
        turns.setdefault(arrival.conversation, []).append(executor.name)
    num_home = sum(max(map(names.count, set(names))) for names in turns.values())

    assert num_home >= 0.9 * NUM_ARRIVALS
