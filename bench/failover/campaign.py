"""`python -m bench.failover campaign`: faults at random, of everything, under mixed requests.

Two executors with engines, two gateways, planner, tracker and Redis. Each is killed, stopped and
asked to end, engines and workers apart from their fronts; links are cut, silent and slow. Of the
clients some break their connections and come back; those whose gateway is killed send again, half
of them with what they have. Each answer is compared with that of an undisturbed run.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.document import circumstances, save
from bench.failover.again import may_resume, sent_again
from bench.failover.asked import Asked, Got, load
from bench.failover.doors import Answer, Doors
from bench.failover.site import ENGINE_STALL_S, LINK_STALL_S, OVERLAP_TOKENS, name_of
from bench.failover.whole_stack import (
    EXECUTORS,
    GATEWAYS,
    edges_of,
    num_connected,
    stack_in,
    start_again,
    start_all,
    told,
    undisturbed,
)
from lab.stack.link_proxy import LinkProxy
from lab.stack.processes import MODEL, Stack, kind_of, stopped

NUM_TOKENS = 120  # of an answer
LAME_DUCK_S = 1.0
BREAKS_SHARE = 0.1  # of requests over HTTP, whose clients break their connections and come back
MAX_BREAK = 40  # events, behind which one breaks
WITH_IDS_SHARE = 0.5  # of those that are sent again, where ids are told
FAULTS = (
    *itertools.product(
        ("executor", "engine", "worker", "gateway", "planner", "tracker", "redis"),
        ("killed", "stopped"),
    ),
    *itertools.product(("executor", "gateway", "planner", "tracker", "redis"), ("ended",)),
    *itertools.product(("link",), ("cut", "silent", "slow")),
)
SIGNALS = {"killed": signal.SIGKILL, "ended": signal.SIGTERM}
Fault = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """After how long gateways take a silent link, and an engine without steps, for lost."""

    link_s: float = LINK_STALL_S
    engine_s: float = ENGINE_STALL_S


class Place:
    """All processes and links, and what is done to them, one thing at a time."""

    def __init__(
        self, stack: Stack, links: Sequence[LinkProxy], rng: random.Random, stalls: Stalls
    ) -> None:
        self.stack, self._links, self._rng, self._stalls = stack, links, rng, stalls
        self.kills_s: dict[str, list[float]] = {stack.url(name): [] for name in GATEWAYS}

    def strike(self, what: str, how: str) -> None:
        """Do it, and return when everything is there again."""
        away_s = self._rng.uniform(0.5, 2 * self._stalls.link_s)
        names = dict.fromkeys(("executor", "engine", "worker"), EXECUTORS) | {"gateway": GATEWAYS}
        name = self._rng.choice(names.get(what, (what,)))
        match what, how:
            case "link", _:
                self._strike_link(self._rng.choice(self._links), how, away_s)
            case "engine" | "worker", "stopped":
                with stopped(self.stack.engine_processes(name)[what == "worker" :]):
                    time.sleep(self._stalls.engine_s + away_s)
            case _, "stopped":
                with self.stack.frozen(name):
                    time.sleep(away_s)
            case "redis", _:
                self.stack.kill(name, SIGNALS[how])
                time.sleep(away_s)
                self.stack.start(name)
            case _:
                self._end(what, name, how)

    def _strike_link(self, link: LinkProxy, how: str, away_s: float) -> None:
        if how == "cut":
            link.cut()
            return
        with link.silent() if how == "silent" else link.slow(self._rng.uniform(0.02, 0.5)):
            time.sleep(away_s)

    def _end(self, what: str, name: str, how: str) -> None:
        before = num_connected(self.stack)
        if what in ("engine", "worker"):
            self.stack.engine_processes(name)[what == "worker"].kill()
            self.stack.wait_exit(name)  # by itself
        else:
            if kind_of(name) == "gateway" and how == "killed":
                self.kills_s[self.stack.url(name)].append(time.time())
            self.stack.kill(name, SIGNALS[how])
        start_again(self.stack, name, before)


@dataclass(slots=True, kw_only=True)
class Campaign:
    """What came of it so far."""

    place: Place
    doors: Doors
    expected: Mapping[str, Got]
    rng: random.Random  # of clients
    asking: set[str] = field(default_factory=set)  # names of what is being answered
    num_answers: int = 0
    num_identical: int = 0
    num_came_back: int = 0  # clients that broke their connections, or one of them
    num_sent_again: int = 0  # the gateway was killed, or had gone when the client came back
    num_sent_with_ids: int = 0  # of these
    num_refused: int = 0  # times that no gateway took a request
    wrong: list[list[Any]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    until_s: float = math.inf  # by the monotonic clock

    async def wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition. Returns whether there is time left."""
        while not condition() and time.monotonic() < self.until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return time.monotonic() < self.until_s

    async def ask(self, asked: Asked) -> None:
        """Have a request answered, and sent again if its gateway is killed."""
        expected = self.expected[asked.name.partition(".")[0]]
        request, had = asked, None
        if asked.path and self.rng.random() < BREAKS_SHARE:
            request = self._with_breaks(asked)
            self.num_came_back += 1
        self.asking.add(asked.name)
        while True:
            answer = await self.doors.ask(request, expected, had)
            self.num_refused += answer.num_times_by_all
            if not self._is_lost_with_its_gateway(answer):
                break
            self.num_sent_again += 1
            request, had = asked, None  # what is sent again cannot be taken up
            if may_resume(asked) and self.rng.random() < WITH_IDS_SHARE:
                request, had = sent_again(request, answer.got), answer.got
                self.num_sent_with_ids += 1
        self.asking.remove(asked.name)
        self.num_answers += 1
        self.num_identical += answer.is_identical
        if answer.got.error:
            self.errors[asked.name] = answer.got.error
        elif not answer.is_identical:
            self.wrong.append([asked.name, expected.said, answer.got.said])

    def _with_breaks(self, asked: Asked) -> Asked:
        """Have a client break its connection some times, and come back."""
        evenflow = asked.body["evenflow"] | {"resumable": True}
        breaks = [self.rng.randint(1, MAX_BREAK) for _ in range(self.rng.randint(1, 3))]
        return replace(asked, body=asked.body | {"evenflow": evenflow}, breaks=breaks)

    def _is_lost_with_its_gateway(self, answer: Answer) -> bool:
        if not answer.got.is_broken_off and not answer.got.is_gone:
            return False
        if not answer.got.begins(answer.expected):
            self.wrong.append([answer.asked.name, answer.expected.said, answer.got.said])
        kills_s = self.place.kills_s[answer.url]
        return answer.got.is_gone or any(answer.overlaps(at_s, at_s) for at_s in kills_s)

    def unexplained(self) -> dict[str, str]:
        """Return the errors of which no gateway's log says why."""
        stack = self.place.stack
        lines = [line for name in GATEWAYS for line in told(stack, name, "request_not_moved")]
        explained = {name_of(line) for line in lines}
        return {name: why for name, why in self.errors.items() if name not in explained}

    def content(self) -> dict[str, Any]:
        stack = self.place.stack
        moved = [line for name in GATEWAYS for line in told(stack, name, "request_moved")]
        return {
            "answers": self.num_answers,
            "identical": self.num_identical,
            "wrong": self.wrong,
            "errors": self.errors,
            "unexplained": self.unexplained(),
            "came_back": self.num_came_back,
            "sent_again": self.num_sent_again,
            "sent_with_ids": self.num_sent_with_ids,
            "refused": self.num_refused,
            "faults": dict(self.faults),
            "moves": Counter(line["cause"] for line in moved),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is asked, and how often something fails."""

    requests: int  # at least
    faults: int
    minutes: float = math.inf  # at most
    is_each_struck_once: bool = False  # no request meets two faults: none is taken for poison


def faults_at_random(rng: random.Random) -> Iterator[Fault]:
    """Draw without end; each comes once before one comes again."""
    while True:
        yield from rng.sample(FAULTS, len(FAULTS))


async def run(campaign: Campaign, size: Size, faults: Iterator[Fault], rng: random.Random) -> None:
    """Ask and strike until there were enough of both, or the time is up. `rng` says when."""
    campaign.until_s = time.monotonic() + 60 * size.minutes
    is_over = asyncio.Event()
    numbers = itertools.count()

    async def ask_on_and_on(asked: Asked) -> None:
        while not is_over.is_set():
            await campaign.ask(replace(asked, name=f"{asked.name}.{next(numbers)}"))

    looking = asyncio.create_task(campaign.doors.look())
    async with asyncio.TaskGroup() as tasks:
        for asked in load(MODEL, num_tokens=NUM_TOKENS):
            tasks.create_task(ask_on_and_on(asked))
        await _strike(campaign, size, faults, rng)
        await campaign.wait(lambda: campaign.num_answers >= size.requests)
        is_over.set()
    looking.cancel()
    with suppress(asyncio.CancelledError):
        await looking


async def _strike(
    campaign: Campaign, size: Size, faults: Iterator[Fault], rng: random.Random
) -> None:
    per_fault = max(1, size.requests // max(1, size.faults))
    struck: set[str] = set()

    def is_due(num_answers: int) -> bool:
        is_spared = size.is_each_struck_once and struck & campaign.asking
        return campaign.num_answers >= num_answers and not is_spared

    for what, how in itertools.islice(faults, size.faults):
        num_due = campaign.num_answers + rng.randrange(2 * per_fault)
        if not await campaign.wait(partial(is_due, num_due)):
            break
        await asyncio.to_thread(campaign.place.strike, what, how)
        struck = set(campaign.asking)
        campaign.faults[f"{what} {how}"] += 1
        print(f"{campaign.num_answers} answers, {what} {how}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Return 1 if an answer was wrong, doubled or lost, or ended without a reason in a log."""
    parser = argparse.ArgumentParser(prog="bench.failover campaign", description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=10_000, help="at least; default %(default)s"
    )
    parser.add_argument("--faults", type=int, default=300, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the faults; default %(default)s")
    parser.add_argument("--minutes", type=float, default=600.0, help="at most; default %(default)s")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench"), help="JSON goes here")
    options = parser.parse_args(arguments)
    load_before, began_s = os.getloadavg(), time.monotonic()
    size = Size(requests=options.requests, faults=options.faults, minutes=options.minutes)
    rng = random.Random(options.seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        campaign_in(Path(folder), options.seed) as campaign,
    ):
        asyncio.run(run(campaign, size, faults_at_random(rng), rng))
        content = {
            "benchmark": "campaign",
            **circumstances(load_before),
            "asked_for": {name: getattr(options, name) for name in ("requests", "faults", "seed")},
            "took_s": time.monotonic() - began_s,
            **campaign.content(),
        }
    save(content, options.out / "failover-campaign.json")
    print(json.dumps({name: one for name, one in content.items() if name != "wrong"}, indent=1))
    return int(bool(content["wrong"] or content["unexplained"]))


@contextmanager
def campaign_in(folder: Path, seed: int, stalls: Stalls = Stalls()) -> Iterator[Campaign]:
    """Run it all, with logs in `folder`; an undisturbed run has been made."""
    with ExitStack() as ending:
        links, stack = _stack(folder, stalls, ending)
        start_all(stack)
        edges = edges_of(stack)
        yield Campaign(
            place=Place(stack, links, random.Random(f"{seed} places"), stalls),
            doors=Doors(edges),
            expected=asyncio.run(undisturbed(edges[0], NUM_TOKENS)),
            rng=random.Random(f"{seed} clients"),
        )


def _stack(folder: Path, stalls: Stalls, ending: ExitStack) -> tuple[list[LinkProxy], Stack]:
    stack = stack_in(
        folder,
        GATEWAY_LAME_DUCK_S=LAME_DUCK_S,
        GATEWAY_LINK_STALL_S=stalls.link_s,
        GATEWAY_ENGINE_STALL_S=stalls.engine_s,
        GATEWAY_FAILOVER_OVERLAP_TOKENS=OVERLAP_TOKENS,
    )
    ending.callback(stack.stop)
    links = [ending.enter_context(LinkProxy(stack.address(name))) for name in EXECUTORS]
    stack.settings["GATEWAY_EXECUTORS"] = ",".join(link.address for link in links)
    return links, stack
