"""Answers whose gateway is killed, sent again to another one with the ids that their readers have.

The gateway that is asked first is a process of its own in each round, and gets SIGKILL; no process
that takes the requests again has heard of them.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.document import Benchmark, Row
from bench.failover.asked import CHAT, NUM_TOKENS, RATE_TPS, TEXT, Asked, Got, ask, ask_all, load
from bench.failover.site import MODEL, Site, free_edge, settings_of_load
from bench.gateway.large_chats import is_ready
from bench.gateway.processes import wait_until

NUM_ANSWERS = 200
FIRST_KILL_S, LATER_BY_S = 0.0, 0.5  # from when all have begun; each round's is later
POLL_S = 0.02


def resumable(model: str) -> list[Asked]:
    """Return the requests of the load that are one answer's and tell the ids of its tokens."""
    return list(filter(may_resume, load(model)))


def may_resume(asked: Asked) -> bool:
    """Return whether a request may be sent again with the tokens that its reader has."""
    return asked.path in ("", CHAT, TEXT) and asked.body.get("n", 1) == 1


def sent_again(asked: Asked, got: Got) -> Asked:
    """Return a request with what its reader has; without anything as it was."""
    ids = ids_of(got)
    if not ids:
        return asked
    resume = {"token_ids": ids}
    if not asked.path:
        return replace(asked, body=asked.body | {"resume": resume})
    return replace(
        asked, body=asked.body | {"evenflow": asked.body["evenflow"] | {"resume": resume}}
    )


def ids_of(got: Got) -> list[int]:
    """Return the ids of the tokens that a reader has, by gRPC or in the only choice."""
    return [int(id) for place in ("ids", "0 ids") for id in got.said.get(place, "").split()]


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), **settings_of_load(Path(folder)))
        with site.running():
            requests = resumable(MODEL)
            asyncio.run(ask_all(site.edge, requests))  # forms are compiled
            expected = asyncio.run(ask_all(site.edge, requests))
            assert not any(got.error for got in expected.values()), expected
            rows: list[Row] = []
            while sum(row["broken"] for row in rows) < NUM_ANSWERS:
                kill_after_s = FIRST_KILL_S + LATER_BY_S * len(rows)
                rows.append(_round(site, Path(folder), kill_after_s, requests, expected))
                assert rows[-1]["broken"], "a round came to its end"
            return rows


def _round(
    site: Site,
    folder: Path,
    kill_after_s: float,
    requests: Sequence[Asked],
    expected: Mapping[str, Got],
) -> Row:
    first = free_edge()

    async def begun() -> dict[str, Got]:
        answers = {one.name: Got() for one in requests}
        answering = asyncio.gather(*(ask(first, one, answers[one.name]) for one in requests))
        while not all(got.arrived_s or got.error for got in answers.values()):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(kill_after_s)
        process.kill()
        await answering
        return answers

    async def ended(broken: Mapping[str, Got]) -> None:
        again = [sent_again(one, broken[one.name]) for one in requests if one.name in broken]
        for got in broken.values():
            got.error = ""
        await asyncio.gather(*(ask(site.edge, one, broken[one.name]) for one in again))

    with site.gateway(first, folder / "first.log") as process:
        wait_until(lambda: is_ready(first.url), "the gateway is ready")
        answers = asyncio.run(begun())
    broken = {name: got for name, got in answers.items() if got.error}
    num_ids = [len(ids_of(got)) for got in broken.values()]
    asyncio.run(ended(broken))
    differing = [name for name, got in broken.items() if got.said != expected[name].said]
    return {
        "killed_after_s": kill_after_s,
        "asked": len(answers),
        "broken": len(broken),
        "identical": sum(
            not got.error and got.said == expected[name].said for name, got in broken.items()
        ),
        "errors": [got.error for got in broken.values() if got.error],
        "differing": differing,
        "num_ids": num_ids,
    }


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = ["killed after, s", "answers broken", "identical", "errors"]
    return [
        header,
        *(
            [
                f"{row['killed_after_s']:.1f}",
                f"{row['broken']} of {row['asked']}",
                str(row["identical"]),
                str(len(row["errors"])),
            ]
            for row in rows
        ),
    ]


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Say whether all answers are what they would have been."""
    identical, broken = (sum(row[name] for row in rows) for name in ("identical", "broken"))
    return [f"identical: {identical} of {broken} (bar: all of {NUM_ANSWERS} at least)"]


BENCHMARK = Benchmark(
    name="again",
    title=f"A gateway that is killed under readers of {RATE_TPS:.0f} tokens/s, who send again what "
    f"they asked for, to another one; answers of {NUM_TOKENS} tokens",
    definitions={
        "killed after": "from when each reader had something",
        "identical": "answers whose two parts together have the text, ids, calls, "
        "log-probabilities (three places), counts and ending of an undisturbed run",
    },
    measure=measure,
    table=table,
    verdicts=verdicts,
)
