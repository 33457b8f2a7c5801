"""How often the way back that is chosen is not the one of least delay, as measured.

Requests of random lengths are parked and resumed beside random numbers of others, over links of
several rates, each in all three ways; `cheapest_resume` is asked with what the engine has measured.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from bench.document import Benchmark, Row
from bench.parking.costs import CASE, Drive
from lab.engine.orders import forget_free_blocks, park, resume
from services.placement.run.resume import LinkAndStep, ParkedRequest, ResumeWay, cheapest_resume

LINKS_BYTES_PER_S = (2e7, 1e8, 1e9)
DRAWS = 14  # of each link
REPETITIONS = 7
WINDOW = 24  # tokens of the resumed request, until which everybody's delay counts
SPREAD_FRAC, SPREAD_S = 0.1, 0.01  # by which two delays differ that are not the same


def measure() -> list[Row]:
    rows: list[Row] = []
    for link in LINKS_BYTES_PER_S:
        kv = replace(CASE.kv, h2d_bytes_per_s=link, d2h_bytes_per_s=link) if CASE.kv else None
        drive = Drive(replace(CASE, kv=kv))
        rng = random.Random(f"{link}")
        _delay(drive, 256, 2, ResumeWay.RECOMPUTE)  # rates are measured
        for _ in range(DRAWS):
            num_tokens, num_others = rng.randint(64, 800), rng.randint(1, 6)
            rows.append(_draw(drive, link, num_tokens, num_others))
        drive.runner.close()
    return rows


def _draw(drive: Drive, link: float, num_tokens: int, num_others: int) -> Row:
    measured_s: dict[str, list[float]] = {way.value: [] for way in ResumeWay}
    chosen: list[str] = []
    for _ in range(REPETITIONS):
        for way in ResumeWay:
            delay_s, choice = _delay(drive, num_tokens, num_others, way)
            measured_s[way.value].append(delay_s)
            chosen.append(choice.value)
    delays_s = {way: statistics.median(them) for way, them in measured_s.items()}
    mode, best = statistics.mode(chosen), min(delays_s, key=delays_s.__getitem__)
    lost_s = delays_s[mode] - delays_s[best]
    pairs = zip(measured_s[mode], measured_s[best], strict=True)
    num_behind = sum(one > other for one, other in pairs)
    return {
        "link_bytes_per_s": link,
        "num_tokens": num_tokens,
        "num_others": num_others,
        "chosen": mode,
        "delays_s": delays_s,
        "num_behind": num_behind,
        "wrong": num_behind == REPETITIONS and lost_s > max(SPREAD_S, SPREAD_FRAC * delays_s[best]),
    }


def _delay(
    drive: Drive, num_tokens: int, num_others: int, way: ResumeWay
) -> tuple[float, ResumeWay]:
    """Return everybody's delay in request-seconds, and the way that would have been chosen."""
    choices: list[ResumeWay] = []

    def choose(parked: ParkedRequest, engine: LinkAndStep) -> ResumeWay:
        choices.append(cheapest_resume(parked, engine))
        return way

    scheduler = drive.scheduler
    name = drive.start(num_tokens, num_output=8 * WINDOW)
    others = [drive.start(64, num_output=400) for _ in range(num_others)]
    while not drive.is_copied(name):
        drive.step()
    park(scheduler, name)
    while scheduler.requests[name] in scheduler.running:
        drive.step()
    scheduler.control.resumes.choose_way = choose
    before = {one: drive.num_output(one) for one in (name, *others)}
    began_s = time.perf_counter()
    forget_free_blocks(scheduler)
    resume(scheduler, name)
    while drive.num_output(name) < before[name] + WINDOW:
        drive.step()
    elapsed_s = time.perf_counter() - began_s
    made = [drive.num_output(one) - number for one, number in before.items()]
    step_s = statistics.median(drive.step() for _ in range(WINDOW))  # with the same requests
    drive.end_all()
    return sum(elapsed_s - number * step_s for number in made), choices[0]


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = ["link MB/s", "draws", "wrong", *(f"{way.value}: chosen, best" for way in ResumeWay)]
    return [header] + [
        _line([row for row in rows if row["link_bytes_per_s"] == link], f"{link / 1e6:.0f}")
        for link in sorted({row["link_bytes_per_s"] for row in rows})
    ]


def _line(rows: Sequence[Row], link: str) -> list[str]:
    best = [min(row["delays_s"], key=row["delays_s"].get) for row in rows]
    counts = [
        f"{sum(row['chosen'] == way.value for row in rows)}, {best.count(way.value)}"
        for way in ResumeWay
    ]
    return [link, f"{len(rows)}", f"{sum(row['wrong'] for row in rows)}", *counts]


BENCHMARK = Benchmark(
    name="choices",
    title="The way back that is chosen, and the one of least delay",
    definitions={
        "delay": f"from resume() to the request's {WINDOW}th token: the time that passes, less a "
        f"decode step per token, over the request and the others; median of {REPETITIONS}",
        "wrong": f"the chosen way's delay is more than {SPREAD_FRAC:.0%} and "
        f"{1e3 * SPREAD_S:.0f} ms above the least, and above it in each repetition",
    },
    measure=measure,
    table=table,
)
