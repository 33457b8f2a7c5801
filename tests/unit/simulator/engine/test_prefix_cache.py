"""Cached prefixes: the next turn of a conversation computes its new tokens only."""

from dataclasses import replace

import pytest

from lab.policies.presets import full_name
from services.placement.run.types import RunPhase
from services.placement.types import EngineShape, RequestId
from simulator.compose import make_engine
from simulator.device.costs import LinearCosts
from simulator.engine.engine import Engine
from simulator.engine.machine import Machine
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import RunRecord
from simulator.engine.simulation import simulate
from simulator.memory.requests import live_request
from simulator.workload import ArrivingRequest, as_conversations

SHAPE = EngineShape(
    num_layers=4,
    layers_per_group=1,
    block_size=4,
    num_blocks=400,
    block_bytes=1_000,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_host_blocks=4_000,
    max_model_len=400,
)


def make(
    *,
    link_bytes_per_s: float = 1e6,
    token_s: float = 0.1,
    num_host_blocks: int = 4_000,
    policy: str = full_name("dynamic-heuristic"),
    prefix_caching: bool = True,
) -> Engine:
    """Return an engine of four layers; `token_s`: of a token in one layer."""
    costs = LinearCosts(layer_base_s=1.0, per_token_s=token_s, outside_step_s=0.5)
    machine = Machine(costs=costs, link_bytes_per_s=link_bytes_per_s, chunk_bytes=1_000)
    shape = replace(SHAPE, num_host_blocks=num_host_blocks)
    options = PlanningOptions(policy=policy, prefix_caching=prefix_caching)
    return make_engine(shape, machine, options)


def asked(
    name: str, arrival_s: float, num_prompt_tokens: int, *, of: str = "", hashes: tuple = ()
) -> ArrivingRequest:
    return ArrivingRequest(
        request_id=RequestId(name),
        arrival_s=arrival_s,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=20,
        conversation=of,
        prompt_hashes=hashes,
    )


def run(engine: Engine, *requests: ArrivingRequest) -> RunRecord:
    return simulate(engine, requests, after_event=lambda event: engine.check_integrity())


def ttft_s(record: RunRecord, name: str) -> float:
    outcome = next(one for one in record.outcomes if one.request_id == name)
    return outcome.generated_s[0] - outcome.arrival_s


# 90 prompt tokens and 20 of an answer whose newest token is not computed: 109 have KV, in 27 full
# blocks. The next turn's prompt is 110 tokens of history and 30 new ones.
FIRST = asked("first", 0.0, 90, of="c")
SECOND = asked("second", 1e4, 140, of="c")
# 396 tokens are 99 blocks of each layer, of 400 in all: one block of each still holds what it did.
FILLS = asked("fills", 5e3, 376)
# Runs when the next turn comes, in steps of seconds.
BESIDE = asked("beside", 1e4 - 1.0, 20)


@pytest.mark.parametrize(
    ("way", "link_bytes_per_s", "token_s", "others"),
    [
        # 27 blocks of 4 layers are 108,000 bytes.
        ("host_resident", 1e7, 0.1, [BESIDE]),  # 0.01 s more of two requests' step, which goes on
        ("load", 1e6, 0.1, []),  # in 0.11 s, and nobody waits
        ("load", 1e4, 0.1, []),  # in 10.8 s; all tokens again would take 43 s
        ("recompute", 1e4, 0.001, []),
    ],
)
def test_the_next_turn_begins_with_what_is_cached_the_cheapest_way(
    way, link_bytes_per_s, token_s, others
) -> None:
    engine = make(link_bytes_per_s=link_bytes_per_s, token_s=token_s)
    record = run(engine, FIRST, FILLS, *others, SECOND)

    assert {name: number for name, number in record.totals.resumes.items() if number} == {way: 1}
    assert record.totals.num_cached_tokens == (0 if way == "recompute" else 108)


def test_what_the_pool_still_has_comes_back_without_a_copy() -> None:
    record = run(make(link_bytes_per_s=1e4), FIRST, SECOND)

    assert {way for way, number in record.totals.resumes.items() if number} == {"load"}
    assert record.totals.num_cached_tokens == 108
    assert (record.totals.num_found_blocks, record.totals.num_loaded_blocks) == (4 * 27, 0)
    assert record.totals.h2d_bytes == 0


def test_what_the_pool_has_of_some_blocks_is_found_before_the_others_come_back() -> None:
    record = run(make(), FIRST, asked("middle", 5e3, 317, of="m"), SECOND)

    found, loaded = record.totals.num_found_blocks, record.totals.num_loaded_blocks
    assert found + loaded == 4 * 27
    assert found == 4 * 16  # all of whose blocks none has had since


def test_of_two_that_come_at_once_one_finds_what_the_pool_has() -> None:
    record = run(make(), FIRST, SECOND, replace(SECOND, request_id=RequestId("third")))

    assert record.totals.num_cached_tokens == 2 * 108
    assert record.totals.num_found_blocks == 4 * 27
    assert record.totals.duplicate_s > 0


def test_a_hit_makes_the_first_token_come_earlier() -> None:
    cached = run(make(), FIRST, SECOND)
    computed = run(make(prefix_caching=False), FIRST, SECOND)

    assert ttft_s(cached, "first") == ttft_s(computed, "first")
    # 32 tokens in one step are 4 layers of 1 + 3.2 s; 140 are three steps, of 64, 64 and 12.
    assert ttft_s(cached, "second") == pytest.approx(17.3, abs=0.2)
    assert ttft_s(computed, "second") == pytest.approx(12 + 56 + 1.5, abs=0.2)
    assert computed.totals.num_cached_tokens == 0


def test_who_begins_otherwise_finds_nothing() -> None:
    others = [replace(SECOND, conversation=name) for name in ("d", "")]

    for other in others:
        assert run(make(), FIRST, other).totals.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("name", "num_cached"),
    [
        # The host has 280 slots. "a" and "b" leave 27 columns each, 216 slots. "c" asks for 28,
        # 112 slots: "a" gives up its last 12 columns, and has 15.
        ("a", 60),
        ("b", 108),
        ("c", 108),
    ],
)
def test_the_end_of_what_was_used_longest_ago_gives_way(name, num_cached) -> None:
    engine = make(num_host_blocks=280)
    firsts = [asked(one, 1e4 * number, 90, of=one) for number, one in enumerate("abc")]

    record = run(engine, *firsts, asked("again", 3e4, 140, of=name))

    assert record.totals.num_cached_tokens == num_cached


def test_who_comes_while_another_runs_begins_with_what_that_one_has_computed() -> None:
    twins = [asked("one", 0.0, 90, of="c"), asked("other", 140.0, 90, of="c")]
    engine = make(token_s=0.5)
    record = run(engine, *twins)

    # 64 tokens take the first step 4 x (1 + 32) s, the other 26 begin at 132.5 s.
    assert record.totals.num_cached_tokens == 64
    assert engine.scheduler.host.cache.num_columns == 27  # none is there twice


def test_hashed_prompts_share_what_their_pieces_have_in_common() -> None:
    """Of 1,200 tokens 1,024 have a hash in common; the answer has none."""
    first, second = (
        asked(name, 0.0, 1_200, hashes=(1, 2, tail)) for name, tail in (("f", 3), ("s", 4))
    )

    keys = [list(one.block_keys(16)) for one in (first, second)]
    assert [len(one) for one in keys] == [75, 75]
    assert keys[0][:64] == keys[1][:64]
    assert not set(keys[0][64:]) & set(keys[1][64:])
    assert len(set(keys[0])) == 75
    # A block whose end is in the next piece begins as those before it.
    assert list(first.block_keys(500))[1] != list(second.block_keys(600))[1]


def test_the_turns_of_a_conversation_begin_with_all_before_them() -> None:
    drawn = [asked(f"r{number}", 10.0 * number, 30 + number) for number in range(5)]
    turns = as_conversations(drawn, num_turns=2, gap_s=100.0)

    assert [(one.request_id, one.arrival_s, one.num_prompt_tokens) for one in turns] == [
        ("r0", 0.0, 30),
        ("r2", 20.0, 32),
        ("r4", 40.0, 34),
        ("r1", 100.0, 30 + 20 + 31),
        ("r3", 120.0, 32 + 20 + 33),
    ]
    assert [one.conversation for one in turns] == ["r0", "r2", "r4", "r0", "r2"]


def test_policies_know_what_of_a_newcomer_s_prompt_is_cached() -> None:
    engine = make(policy="evenflow")
    run(engine, FIRST)
    for number, one in enumerate((SECOND, replace(SECOND, conversation="d"))):
        request = live_request(
            replace(one, request_id=RequestId(f"n{number}")), engine.scheduler.geometry
        )
        engine.scheduler.add(request)
    assert engine.loop.admission is not None

    known, unknown = engine.loop.admission.snapshot(0.0).requests

    assert (known.phase, unknown.phase) == (RunPhase.NEW, RunPhase.NEW)
    assert (known.num_prompt_left, unknown.num_prompt_left) == (140 - 108, 140)
