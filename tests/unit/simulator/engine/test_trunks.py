"""Requests that begin alike share that part of their KV in the pool, and on the link."""

import random
from dataclasses import replace

import pytest

from lab.policies.presets import full_name
from services.placement.types import RequestId
from simulator.engine.engine import Engine
from simulator.engine.records import Outcome, RunRecord
from simulator.engine.simulation import simulate
from simulator.engine.turns import Turn, staged_of
from simulator.workload import ArrivingRequest
from tests.unit.simulator.engine.test_prefix_cache import SHAPE, asked, make, run


def sharing(policy: str = "evenflow", **given) -> Engine:
    """Return an engine on which even two blocks are shared."""
    engine = make(policy=policy, **given)
    engine.scheduler.moves.trunks.min_tokens = 8
    return engine


# Of one conversation: each prompt begins with all of the shorter ones.
AGENTS = [asked(f"r{number}", 110.0 * min(number, 1), 200 + number, of="c") for number in range(4)]


def test_what_several_begin_with_is_in_the_pool_once() -> None:
    """Four prompts of 200 tokens are 4 x 50 positions; the pool has 100."""
    engine, num_at_once = sharing(), []
    simulate(engine, AGENTS, after_event=lambda _: num_at_once.append(count(engine)))
    alone, num_alone = make(policy="evenflow"), []  # where 256 tokens at least are shared
    simulate(alone, AGENTS, after_event=lambda _: num_alone.append(count(alone)))

    assert (max(num_at_once), max(num_alone)) == (4, 2)
    assert engine.scheduler.counters.num_trunk_joins == 3
    assert engine.totals.duplicate_s == 0.0


def count(engine: Engine) -> int:
    return len(engine.scheduler.running)


def test_a_trunk_s_layers_are_loaded_once_for_all_its_users() -> None:
    engine, loads = sharing(), []

    def place(_) -> None:
        engine.check_integrity()
        scheduler = engine.scheduler
        for trunk in scheduler.moves.trunks.all:
            if len(trunk.users) == 4 and not trunk.offloaded:
                scheduler.moves.offload(trunk, [1, 2])
                turns = [turn(one) for one in scheduler.running]
                loads.append((trunk.num_rows, staged_of(turns, SHAPE)))

    def turn(request) -> Turn:
        return Turn(request=request, num_tokens=1, num_before=0, num_staged=0, num_direct=0)

    simulate(engine, AGENTS, after_event=place)

    num_blocks, (staged,) = loads[0]
    assert (staged.offloaded, staged.group_bytes) == ((1, 2), 1_000 * num_blocks)


AT_ONCE = [asked(f"r{number}", 0.0, 200 + number, of="c") for number in range(3)]


def test_what_a_step_fills_is_shared_before_it_is_on_the_host() -> None:
    """The first prompt takes four steps; the others begin with all of it but the last block."""
    record = run(sharing(link_bytes_per_s=1.0), *AT_ONCE)

    assert [one.num_cached_tokens for one in in_order(record)] == [0, 200, 200]
    assert record.totals.d2h_bytes < 4 * 1_000  # of 49 blocks of four layers


def in_order(record: RunRecord) -> list[Outcome]:
    return sorted(record.outcomes, key=lambda one: one.request_id)


def test_a_trunk_stays_in_the_pool_until_its_copies_are_complete_and_these_go_on() -> None:
    engine, copied = sharing(link_bytes_per_s=1e3), []  # four blocks of a position take 4 s

    def look(_) -> None:
        engine.check_integrity()
        trunks = engine.scheduler.moves.trunks.all
        assert all(trunk.mirrored or not trunk.offloaded for trunk in trunks)
        if trunks and "r0" not in engine.scheduler.records:
            copied.append(sum(trunk.num_copied_blocks - trunk.first for trunk in trunks))

    first = replace(AT_ONCE[0], num_output_tokens=1)
    simulate(engine, [first, *AT_ONCE[1:]], after_event=look)

    assert 0 < copied[0] < 50
    assert copied[0] < copied[-1]


def test_a_copy_that_a_split_cuts_through_goes_on_for_the_trunk() -> None:
    """The first one's 15 blocks are one copy, of a minute; the other shares 10 of them."""
    engine, is_copied = sharing(link_bytes_per_s=1e3), []
    first = replace(asked("first", 0.0, 60, of="c"), num_output_tokens=2)

    def look(_) -> None:
        engine.check_integrity()
        if "first" not in engine.scheduler.records:
            is_copied.extend(trunk.mirrored for trunk in engine.scheduler.moves.trunks.all)

    simulate(engine, [first, asked("other", 0.0, 42, of="c")], after_event=look)

    assert not is_copied[0]
    assert is_copied[-1]


def drawn(seed: int) -> list[ArrivingRequest]:
    """Return requests on three prefixes, some at once, some of which outgrow the pool together."""
    rng = random.Random(seed)
    return [
        asked(f"r{number}", 60.0 * rng.randrange(12), rng.randrange(20, 250), of=rng.choice("abc"))
        for number in range(14)
    ]


@pytest.mark.parametrize(
    "policy", ["evenflow", *map(full_name, ("dynamic-heuristic", "orbitflow", "tokenflow"))]
)
def test_no_block_is_lost_or_counted_twice_whoever_shares_it(policy: str) -> None:
    num_joins = num_splits = 0
    for seed, link_bytes_per_s in enumerate((1e6, 1e4)):
        engine = sharing(policy, token_s=0.02, link_bytes_per_s=link_bytes_per_s)
        record = run(engine, *drawn(seed))
        assert finished(record) == 14
        assert not engine.scheduler.moves.trunks.all
        assert engine.scheduler.pool.num_free == SHAPE.num_blocks
        num_joins += engine.scheduler.counters.num_trunk_joins
        num_splits += engine.scheduler.counters.num_trunk_splits

    assert num_joins > 5
    assert num_splits > 2


def finished(record: RunRecord) -> int:
    return sum(len(one.generated_s) == one.num_output_tokens for one in record.outcomes)


def test_policies_see_what_is_shared() -> None:
    engine, seen = sharing(), []

    def look(_) -> None:
        assert engine.loop.admission is not None
        seen.append(engine.loop.admission.snapshot(engine.h2d.now_s))

    simulate(engine, AGENTS, after_event=look)

    snapshot = max(seen, key=lambda one: len(one.requests))
    assert [request.request_id for request in snapshot.requests] == list(map(RequestId, names()))
    # 200 tokens are 50 blocks; the last token's is not shared.
    assert sum(snapshot.prefix_rows) >= 49
    assert all(request.prefixes for request in snapshot.requests)


def names() -> list[str]:
    return [one.request_id for one in AGENTS]


def test_under_ellm_nothing_is_shared() -> None:
    engine = sharing("ellm")
    run(engine, *AGENTS)

    assert not engine.scheduler.counters.num_trunk_joins
