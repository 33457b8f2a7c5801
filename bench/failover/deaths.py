"""What is done to an executor while it answers, and what readers feel of it.

The same load is answered once undisturbed; each case then has one of the executors killed, stopped,
asked to end, or cut off, and every answer is compared with the undisturbed one.
"""

import asyncio
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.document import Benchmark, Row
from bench.failover import caches
from bench.failover.asked import RATE_TPS, Asked, Got, ask_all, load
from bench.failover.site import (
    ENGINE_STALL_S,
    LINK_STALL_S,
    Site,
    name_of,
    settings_of_load,
    time_of,
)

FAULT_AFTER_S = 3.0  # from the asking: all have 32 tokens or so, and none is complete
FELT_S = 0.75  # of a reader that gets tokens each 1 / RATE_TPS
# What a CPU computes in less than FELT_S: answers that move in are not one step of a second.
MAX_NUM_BATCHED_TOKENS = 256
BLOCK_SIZE = 32  # tokens; vLLM's 128 on a CPU are more than these requests have
SETTLE_S = 20.0  # a process that was stopped is let go on after so long

THOUGHT_AND_SAID = {"0 reasoning", "0 content"}

Fault = Callable[[Site, int], None]


def kill(site: Site, number: int) -> None:
    _signal_front(site, number, signal.SIGKILL)


def stop(site: Site, number: int) -> None:
    _signal_front(site, number, signal.SIGSTOP)


def end(site: Site, number: int) -> None:
    _signal_front(site, number, signal.SIGTERM)


def kill_core(site: Site, number: int) -> None:
    _core(site, number).kill()


def stop_core(site: Site, number: int) -> None:
    _core(site, number).suspend()


def cut(site: Site, number: int) -> None:
    site.links[number].cut()


def silence(site: Site, number: int) -> None:
    quiet = site.links[number].silent()
    quiet.__enter__()
    site.broken = quiet


def _signal_front(site: Site, number: int, what: int) -> None:
    site.executors[number].process.send_signal(what)


def _core(site: Site, number: int) -> psutil.Process:
    return site.executors[number].engine_processes()[0]


def _kill_worker(site: Site, number: int) -> None:
    site.executors[number].engine_processes()[1].kill()


def _stop_worker(site: Site, number: int) -> None:
    site.executors[number].engine_processes()[1].suspend()


CASES: Mapping[str, Fault] = {
    "front killed": kill,
    "front stopped": stop,
    "engine killed": kill_core,
    "engine stopped": stop_core,
    "SIGTERM": end,
    "link cut": cut,
    "link silent": silence,
}
WORKERS: Mapping[str, Fault] = {"worker killed": _kill_worker, "worker stopped": _stop_worker}
LEAVES_LIFE = frozenset({"link cut", "link silent"})
# Within what the gateway takes an executor for lost, from the fault on.
NOTICED_S = {
    "front stopped": LINK_STALL_S + 1,
    "link silent": LINK_STALL_S + 1,
    "engine stopped": ENGINE_STALL_S + 4,
    "worker stopped": ENGINE_STALL_S + 4,
}


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        two = _measured(Path(folder), num_executors=2, cases={**CASES, **WORKERS})
    with tempfile.TemporaryDirectory() as folder:
        lone = _measured(Path(folder), num_executors=1, cases=LONE)
    return [*two, *lone]


def _measured(folder: Path, *, num_executors: int, cases: Mapping[str, Fault]) -> list[Row]:
    site = Site(
        folder,
        num_executors=num_executors,
        MAX_NUM_BATCHED_TOKENS=MAX_NUM_BATCHED_TOKENS,
        BLOCK_SIZE=BLOCK_SIZE,
        **settings_of_load(folder),
    )
    with site.running():
        requests = load(site.edge.model)
        asyncio.run(ask_all(site.edge, requests))  # forms are compiled
        expected = asyncio.run(ask_all(site.edge, requests))
        assert not any(got.error for got in expected.values()), expected
        assert expected["thoughts"].said.keys() >= THOUGHT_AND_SAID
        return [
            {"executors": num_executors, **_case(site, name, fault, requests, expected)}
            for name, fault in cases.items()
        ]


def _kill_and_restart(site: Site, number: int) -> None:
    kill(site, number)
    site.restart(number)


def _kill_core_and_restart(site: Site, number: int) -> None:
    kill_core(site, number)
    site.restart(number)


LONE: Mapping[str, Fault] = {
    "front killed": _kill_and_restart,
    "engine killed": _kill_core_and_restart,
    "link cut": cut,
}


def _case(
    site: Site, name: str, fault: Fault, requests: list[Asked], expected: Mapping[str, Got]
) -> Row:
    place = site.place_in_log
    told: list[float] = []
    before: dict[int, caches.LookedUp] = {}

    async def disturbed() -> dict[str, Got]:
        answering = asyncio.ensure_future(ask_all(site.edge, requests))
        await asyncio.sleep(FAULT_AFTER_S)
        before.update(await asyncio.to_thread(caches.looked_up, site.executors))
        told.append(time.time())
        await asyncio.to_thread(fault, site, 0)
        return await answering

    answers = asyncio.run(disturbed())
    moved = site.told("request_moved", since=place)
    mend(site, name, 0)
    looked_up = caches.between(before, caches.looked_up(site.executors))
    gaps_s = {one: got.longest_gap_since_s(told[0]) for one, got in answers.items()}
    felt = {name: gap_s > FELT_S for name, gap_s in gaps_s.items()}
    deposits = [_deposit_s(line, answers) for line in moved]
    return {
        "case": name,
        "identical": sum(
            not got.error and got.said == expected[name].said for name, got in answers.items()
        ),
        "asked": len(requests),
        "errors": [got.error for got in answers.values() if got.error],
        "differing": [name for name, got in answers.items() if got.said != expected[name].said],
        "noticed_s": min((time_of(one) - one["waited_s"] for one in moved), default=0.0) - told[0]
        if moved
        else None,
        "moved": len(moved),
        "moved_tokens": looked_up.num_tokens,
        "moved_found_tokens": looked_up.num_found,
        "gaps_s": [one["waited_s"] for one in moved],
        "deposits_s": deposits,
        "longest_gaps_s": list(gaps_s.values()),
        "felt_nothing": sum(not one for one in felt.values()),
        "moved_felt_nothing": sum(not felt.get(name_of(one), False) for one in moved),
        "hidden_by_formula": sum(
            deposit > one["waited_s"] for deposit, one in zip(deposits, moved, strict=True)
        ),
    }


def _deposit_s(line: Mapping[str, Any], answers: Mapping[str, Got]) -> float:
    """Return for how long the reader had enough when the executor was lost."""
    lost_s = time_of(dict(line)) - line["waited_s"]
    got = answers.get(name_of(dict(line)))
    num_read = sum(one <= lost_s for one in got.arrived_s) if got else 0
    return float((line["num_tokens"] - num_read) / RATE_TPS)


def mend(site: Site, name: str, number: int) -> None:
    """Have both executors serve again, of which one has seen a case."""
    place = site.place_in_log
    if site.broken is not None:
        time.sleep(SETTLE_S)
        site.end_silence()
        site.wait_connected(1, since=place)
    elif name not in LEAVES_LIFE and len(site.executors) > 1:
        site.executors[number].kill()
        site.restart(number)


def table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [
        [
            *("executors", "what", "identical", "errors", "moved", "noticed, s", "gap, s"),
            *("felt", "of", "of moved tokens found in a cache"),
        ]
    ]
    for row in rows:
        gaps_s = row["gaps_s"]
        moved = row["moved"]
        lines.append(
            [
                str(row["executors"]),
                row["case"],
                f"{row['identical']} of {row['asked']}",
                str(len(row["errors"])),
                str(moved),
                f"{row['noticed_s']:.1f}" if moved else "",
                f"{min(gaps_s):.1f} to {max(gaps_s):.1f}" if gaps_s else "",
                str(row["asked"] - row["felt_nothing"]),
                f"{moved - row['hidden_by_formula']} by their deposits",
                f"{row['moved_found_tokens']} of {row['moved_tokens']}",
            ]
        )
    return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Say whether answers are identical, hangs are noticed in time, and deposits hide gaps."""
    identical = sum(row["identical"] for row in rows)
    asked = sum(row["asked"] for row in rows)
    late = [
        row["case"]
        for row in rows
        if row["case"] in NOTICED_S
        and row["noticed_s"] is not None
        and row["noticed_s"] > NOTICED_S[row["case"]]
    ]
    felt = [
        f"{row['executors']}, {row['case']}: {row['moved_felt_nothing']} for {formula}"
        for row in rows
        if row["moved_felt_nothing"] < (formula := row["hidden_by_formula"]) - 0.05 * row["asked"]
    ]
    return [
        f"identical: {identical} of {asked} (bar: all)",
        f"errors: {sum(len(row['errors']) for row in rows)} (bar: 0)",
        f"noticed too late: {', '.join(late) or 'none'}",
        "moved without a pause, where that is 5 % of the readers fewer than had enough in deposit: "
        + ("; ".join(felt) or "none"),
    ]


BENCHMARK = Benchmark(
    name="deaths",
    title="An executor that dies, hangs, leaves or is cut off under 22 readers "
    f"of {RATE_TPS:.0f} tokens/s",
    definitions={
        "identical": "answers whose text, ids, calls, log-probabilities (three places), counts but "
        "of what was cached, and ending are those of an undisturbed run",
        "moved": "answers that went on elsewhere, or at the same executor when it was back; "
        "`n` answers count each",
        "a step": f"of the executors has {MAX_NUM_BATCHED_TOKENS} tokens at most",
        "noticed": "from the fault until the gateway took the executor for lost",
        "gap": "from then on until an executor had taken the answer",
        "felt": f"readers to whom nothing came for more than {FELT_S} s, until after the fault",
        "of": "answers whose deposit was shorter than the gap",
        "of moved tokens found in a cache": "of prompts and answers so far, in full blocks of "
        f"{BLOCK_SIZE}, as engines looked them up from the fault on: all other requests had been "
        "taken before it",
    },
    measure=measure,
    table=table,
    verdicts=verdicts,
)
