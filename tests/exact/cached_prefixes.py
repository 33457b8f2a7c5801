"""Requests that begin with what earlier ones left on the host: tokens identical to stock vLLM's.

Stock vLLM answers without any prefix caching. Copies take their time, and what is freed is NaN. The
tests run on the engines of `test_layerwise_exact.py`, which imports them; two of them are functions
that `product.py` calls with every engine.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core import kv_cache_utils

from lab.engine.conversations import BRANCH, SALTED, STEPS_PER_TURN, TWIN, conversations
from lab.engine.step_runner import Arrival, Hook, Outcome, StepRunner, first_difference, make_prompt
from lab.engine.workloads import churn, fixed, random_way, together
from services.control.measures.rates import MAX_MIRRORED_BLOCKS
from services.control.prefixes.prefix_cache import Column
from services.executor.blocks.host_pool import SlotPromise
from services.executor.blocks.pool_blocks import Position
from services.executor.request_tag import KeptTokens, with_kept
from services.placement.run.resume import ResumeWay
from tests.exact import faults
from tests.exact.aborts import AbortsByState
from tests.exact.cases import HALVES, LAYERS
from tests.exact.evidence import assert_pool_is_whole
from tests.exact.reference import reference
from tests.exact.scenes import copies_complete

MIN_HIT_BLOCKS = 1_000  # blocks of one layer that somebody else had computed
MIN_EVICTED_COLUMNS = 100  # whose slots others took
MIN_FOUND_BLOCKS = 500  # of one layer, that a pool still had
KEPT = (0, 3_600.0)  # all of a request, for so many seconds
MAX_ROUNDS = 20  # what is found, and how requests come back, depends on when copies end

TWO_ENGINES = pytest.mark.parametrize(
    "runner", [LAYERS, HALVES], ids=["layers", "halves-asynchronous"], indirect=True
)
LAYERS_ONLY = pytest.mark.parametrize("runner", [LAYERS], ids=["layers"], indirect=True)


@pytest.fixture(scope="module")
def expected_turns() -> Outcome:
    return reference("float32")["conversations"]


@pytest.fixture
def turns(expected_turns: Outcome) -> list[Arrival]:
    return conversations(expected_turns.tokens)


class Hits:
    """Listens for who begins with cached blocks."""

    def __init__(self, runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_blocks: Counter[str] = Counter()  # of one layer, by request
        self._num_layers = runner.case.model.num_layers
        owner = runner.scheduler.block_owner
        self._adopt = owner.adopt_prefix
        monkeypatch.setattr(owner, "adopt_prefix", self._on_adopt)

    def _on_adopt(self, record: Any, columns: Any, keys: Any) -> None:
        self.num_blocks[record.request_id] += len(columns) * self._num_layers
        self._adopt(record, columns, keys)


@pytest.fixture
def hits(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> Hits:
    return Hits(runner, monkeypatch)


def assert_same_tokens(runner: StepRunner, expected: Outcome, outcome: Outcome) -> None:
    assert first_difference(expected, outcome) == {}
    assert_pool_is_whole(runner)


@contextmanager
def room_for(runner: StepRunner, num_columns: int) -> Iterator[None]:
    """Leave room on the host for so many columns."""
    host = runner.scheduler.block_owner.host
    early = Arrival(request_id="early", prompt=make_prompt(5, seed=1), num_output_tokens=9)
    while host.num_ready < host.num_slots:  # its memory is pinned late
        runner.run([early])
    runner.scheduler.reset_prefix_cache()
    num_left = num_columns * runner.scheduler.block_owner.geometry.num_groups
    taken, check = host.take(SlotPromise(), host.num_free - num_left), host.check_integrity
    assert taken is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            host, "check_integrity", lambda owned, *others: check([*owned, *taken], *others)
        )
        try:
            yield
        finally:
            host.give_back(taken)


def converse_in_all_ways(
    runner: StepRunner, expected: Outcome, turns: list[Arrival], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assert that turns begin with what the last ones left, by each way, while layers move."""
    resumes, counters = runner.scheduler.control.resumes, runner.scheduler.block_owner.counters
    hits, before = Hits(runner, monkeypatch), counters.copy()
    for seed in range(MAX_ROUNDS):
        monkeypatch.setattr(resumes, "choose_way", random_way(seed))

        outcome = runner.run(turns, hook=churn(seed, share=0.2))

        assert_same_tokens(runner, expected, outcome)
        ways = {w for w in ResumeWay if counters.num_prefix_hits(w) > before.num_prefix_hits(w)}
        if hits.num_blocks.total() >= MIN_HIT_BLOCKS and ways == set(ResumeWay):
            break
    assert hits.num_blocks.total() >= MIN_HIT_BLOCKS
    assert ways == set(ResumeWay)
    assert {BRANCH, TWIN} <= hits.num_blocks.keys()
    assert SALTED not in hits.num_blocks


def converse_with_little_room(runner: StepRunner, expected: Outcome, turns: list[Arrival]) -> None:
    """Assert that columns are evicted, and their slots used again."""
    counters = runner.scheduler.block_owner.counters
    num_before = counters.num_evicted_columns
    with room_for(runner, 60):  # eight conversations come to more than 100
        for seed in range(MAX_ROUNDS):
            outcome = runner.run(turns, hook=churn(seed, share=0.1))

            assert first_difference(expected, outcome) == {}
            if counters.num_evicted_columns - num_before >= MIN_EVICTED_COLUMNS:
                break
    assert counters.num_evicted_columns - num_before >= MIN_EVICTED_COLUMNS
    assert_pool_is_whole(runner)


@TWO_ENGINES
def test_every_turn_begins_with_the_last_ones_blocks_in_all_ways_while_layers_move(
    runner: StepRunner,
    expected_turns: Outcome,
    turns: list[Arrival],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    converse_in_all_ways(runner, expected_turns, turns, monkeypatch)


@TWO_ENGINES
def test_with_little_room_on_the_host_columns_are_evicted_and_their_slots_used_again(
    runner: StepRunner, expected_turns: Outcome, turns: list[Arrival]
) -> None:
    converse_with_little_room(runner, expected_turns, turns)


@TWO_ENGINES
def test_by_measured_rates_the_tokens_are_exact_and_most_of_the_prompts_are_not_computed(
    runner: StepRunner, expected_turns: Outcome, turns: list[Arrival]
) -> None:
    counters = runner.scheduler.block_owner.counters
    num_prompt_tokens = sum(len(arrival.prompt) for arrival in turns)
    for _ in range(MAX_ROUNDS):
        num_before = counters.num_prefix_hit_tokens

        outcome = runner.run(turns)

        assert_same_tokens(runner, expected_turns, outcome)
        num_hit_tokens = counters.num_prefix_hit_tokens - num_before
        if num_hit_tokens > num_prompt_tokens / 3:
            break
    assert num_hit_tokens > num_prompt_tokens / 3


@LAYERS_ONLY
def test_aborts_while_a_hit_is_loaded_leave_the_others_exact(
    runner: StepRunner,
    expected_turns: Outcome,
    turns: list[Arrival],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner.scheduler.control.resumes, "choose_way", lambda *_: ResumeWay.LOAD)
    aborts = AbortsByState(runner, seed=5, share=0.3)

    outcome = runner.run(turns, hook=together(churn(5, share=0.1), aborts))

    for request_id in aborts.aborted:
        got = outcome.tokens.pop(request_id, [])
        assert got == expected_turns.tokens[request_id][: len(got)]
    assert outcome.tokens.items() <= expected_turns.tokens.items()
    assert aborts.counts["loading"] >= 1
    assert_pool_is_whole(runner)


@LAYERS_ONLY
def test_hints_change_what_is_evicted_and_no_token(
    runner: StepRunner, expected_turns: Outcome, turns: list[Arrival]
) -> None:
    """Eight sessions of two accounts keep what they can, on a host for fewer; one is released."""
    cache, counters = runner.scheduler.block_owner.host.cache, runner.scheduler.block_owner.counters
    hinted = [
        replace(
            turn,
            sampling=turn.sampling
            | {"extra_args": with_kept(None, KeptTokens(f"a{n % 2}", turn.request_id[:2], [KEPT]))},
        )
        for n, turn in enumerate(turns)
    ]
    before = counters.copy()

    def release(scheduler: Any, step: int) -> None:
        if step % STEPS_PER_TURN == 0:
            scheduler.release_session("a0", f"c{step // STEPS_PER_TURN}")

    with room_for(runner, 60):
        for seed in range(MAX_ROUNDS):
            outcome = runner.run(hinted, hook=together(churn(seed, share=0.1), release))

            assert first_difference(expected_turns, outcome) == {}
            if counters.num_evicted_retained_columns > before.num_evicted_retained_columns:
                break
    assert counters.num_evicted_retained_columns > before.num_evicted_retained_columns
    assert cache.num_retained_columns
    runner.scheduler.reset_prefix_cache()
    assert not cache.num_retained_columns
    assert_pool_is_whole(runner)


@LAYERS_ONLY
def test_a_reset_lets_nobody_begin_with_what_was_there(
    runner: StepRunner, expected_turns: Outcome, turns: list[Arrival], hits: Hits
) -> None:
    def reset(scheduler: Any, step: int) -> None:
        scheduler.reset_prefix_cache()

    outcome = runner.run(turns, hook=reset)

    assert_same_tokens(runner, expected_turns, outcome)
    assert not hits.num_blocks


@LAYERS_ONLY
def test_a_hash_without_what_is_before_a_block_is_noticed(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, same = (make_prompt(64, seed=seed) for seed in (1, 2, 3))  # two blocks each
    workload = [
        Arrival(request_id="first", prompt=[*one, *other], num_output_tokens=20),
        Arrival(request_id="second", prompt=[*other, *same], num_output_tokens=20),
        Arrival(request_id="third", prompt=[*one, *same, 7], num_output_tokens=20, step=40),
    ]
    monkeypatch.setattr(runner.scheduler.control.resumes, "choose_way", lambda *_: ResumeWay.LOAD)
    right = runner.run(workload)
    hash_block = kv_cache_utils.hash_block_tokens
    monkeypatch.setattr(
        kv_cache_utils,
        "hash_block_tokens",
        lambda function, parent, tokens, keys: hash_block(function, None, tokens, keys),
    )

    outcome = runner.run(workload)

    assert first_difference(right, outcome).keys() == {"third"}


@TWO_ENGINES
def test_what_ended_requests_leave_in_the_pool_is_taken_as_it_is(
    runner: StepRunner,
    expected_turns: Outcome,
    turns: list[Arrival],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = runner.scheduler.block_owner.counters
    monkeypatch.setattr(runner.scheduler.control.resumes, "choose_way", lambda *_: ResumeWay.LOAD)
    num_before = counters.num_found_blocks
    one_at_a_time = [
        replace(arrival, step=STEPS_PER_TURN * number)
        for number, arrival in enumerate(sorted(turns, key=lambda arrival: arrival.request_id))
    ]

    outcome = runner.run(one_at_a_time, hook=copied_at_once(runner, monkeypatch))

    assert_same_tokens(runner, expected_turns, outcome)
    num_groups = runner.scheduler.block_owner.geometry.num_groups
    num_found = counters.num_found_blocks - num_before
    assert num_found * runner.case.model.num_layers >= MIN_FOUND_BLOCKS * num_groups


def first_again(seed: int) -> list[Arrival]:
    """Return a request, one that takes all blocks of the pool, and one that begins as the first."""
    shared, mine, other = (make_prompt(n, seed=seed + n) for n in (256, 40, 600))
    return [
        Arrival(request_id="first", prompt=shared, num_output_tokens=10),
        Arrival(request_id="second", prompt=other, num_output_tokens=10, step=60),
        Arrival(request_id="third", prompt=[*shared, *mine], num_output_tokens=40, step=120),
    ]


@LAYERS_ONLY
def test_blocks_that_are_found_although_others_have_had_them_are_noticed(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, owner = first_again(8_000), runner.scheduler.block_owner
    monkeypatch.setattr(runner.scheduler.control.resumes, "choose_way", lambda *_: ResumeWay.LOAD)
    with faults.spoiling(faults.FaultyEngine):  # the guard is not asked
        right = runner.run(workload)
        runner.scheduler.reset_prefix_cache()
        let_reused_blocks_be_found(runner, monkeypatch)
        num_before = owner.counters.num_found_blocks

        outcome = runner.run(workload, hook=copied_at_once(runner, monkeypatch))

    assert owner.counters.num_found_blocks > num_before
    assert first_difference(right, outcome).keys() == {"third"}


@LAYERS_ONLY
def test_the_guard_looks_at_blocks_that_nobody_copied(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, counters = first_again(9_000), runner.scheduler.block_owner.counters
    monkeypatch.setattr(runner.scheduler.control.resumes, "choose_way", lambda *_: ResumeWay.LOAD)
    right = runner.run(workload)
    runner.scheduler.reset_prefix_cache()
    let_reused_blocks_be_found(runner, monkeypatch)
    num_before = counters.num_losses_corrupt

    outcome = runner.run(workload, hook=copied_at_once(runner, monkeypatch))

    assert counters.num_losses_corrupt == num_before + 1
    assert first_difference(right, outcome) == {}


def let_reused_blocks_be_found(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the first request leaves, whoever has its blocks then; others leave nothing."""
    blocks = runner.scheduler.block_owner.blocks
    leave, num_ended = blocks.leave, 0

    def leave_once(positions: Iterable[tuple[Column, Position]]) -> None:
        nonlocal num_ended
        num_ended += 1
        if num_ended == 1:
            leave(positions)
        else:
            blocks.release([block for _, held in positions for block in held if block is not None])

    monkeypatch.setattr(blocks, "leave", leave_once)
    monkeypatch.setattr(blocks, "_on_reuse", lambda block: None)
    monkeypatch.setattr(blocks, "check_integrity", lambda: None)


def copied_at_once(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> Hook:
    """Return a hook by which each step's new blocks are on the host before the next one."""
    write_through = runner.scheduler.transfers.write_through
    monkeypatch.setattr(write_through, "_budget", lambda num_under_way: MAX_MIRRORED_BLOCKS)
    return copies_complete


def one_after_the_other(seed: int) -> list[Arrival]:
    """Return a request, one that begins with its prompt, and one that fills the host."""
    shared, mine, other = (make_prompt(n, seed=seed + n) for n in (256, 40, 255))
    return [
        Arrival(request_id="first", prompt=shared, num_output_tokens=40),
        Arrival(request_id="second", prompt=[*shared, *mine], num_output_tokens=60, step=50),
        Arrival(request_id="third", prompt=other, num_output_tokens=10, step=60),
    ]


@pytest.fixture
def second_stays_on_the_host(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> Hook:
    resumes = runner.scheduler.control.resumes
    monkeypatch.setattr(resumes, "choose_way", lambda *_: ResumeWay.HOST_RESIDENT)
    return fixed({"second": frozenset(range(8))}, num_staging=1)


@LAYERS_ONLY
def test_columns_that_are_evicted_while_somebody_uses_them_are_noticed(
    runner: StepRunner, hits: Hits, second_stays_on_the_host: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, cache = one_after_the_other(6_000), runner.scheduler.block_owner.host.cache
    with room_for(runner, 12), faults.spoiling(faults.FaultyEngine):  # the guard is not asked
        right = runner.run(workload, hook=second_stays_on_the_host)
        assert hits.num_blocks.keys() == {"second"}
        monkeypatch.setattr(cache, "share", lambda columns: None)

        outcome = runner.run(workload, hook=second_stays_on_the_host, check=False)

    assert first_difference(right, outcome).keys() == {"second"}


@LAYERS_ONLY
def test_columns_that_are_found_before_they_are_copied_are_noticed(
    runner: StepRunner, hits: Hits, second_stays_on_the_host: Hook
) -> None:
    workload = one_after_the_other(7_000)[:2]  # nobody's blocks were ever in the slots

    with faults.spoiling(faults.HurriesSaves) as faulty:
        outcome = runner.run(workload, hook=second_stays_on_the_host)
    right = runner.run(workload, hook=second_stays_on_the_host)

    assert faulty.num_faults > 0
    assert hits.num_blocks.keys() == {"second"}
    assert first_difference(right, outcome).keys() == {"second"}
