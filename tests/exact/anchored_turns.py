"""Turns that begin where earlier ones ended, of models with windows and states: tokens identical.

Stock vLLM answers without any prefix caching. Copies take their time, and what is freed is NaN. The
tests run on the engines of `test_kinds.py`, which imports them.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from lab.engine.conversations import BRANCH, NUM_ANSWER_TOKENS, SALTED, TWIN, conversations
from lab.engine.step_runner import Arrival, Outcome, StepRunner, first_difference, make_prompt
from lab.engine.workloads import churn, fixed, random_way, together, with_aborts
from services.control.measures.rates import Rates
from services.control.prefixes.anchors import Anchor
from services.executor.blocks.transfers.turn_ends import TurnEnds
from tests.exact import faults
from tests.exact.cached_prefixes import room_for
from tests.exact.cases import num_groups
from tests.exact.evidence import KEEPING, assert_pool_is_whole, assert_tokens
from tests.exact.kinds import kind_reference
from tests.exact.scenes import copies_complete

Named = tuple[str, StepRunner]
TWO_KINDS = pytest.mark.parametrize("named", ["gpt_oss", "granite4"], indirect=True)
MAX_ROUNDS = 8  # which turns find something depends on when copies end
SPREAD = 3  # times as many steps between turns, so that none waits for room until the next one


@dataclass
class Begun:
    """Listens where requests begin that find something."""

    runner: StepRunner

    def __post_init__(self) -> None:
        self.num_tokens: dict[str, int] = {}

    def listen(self, monkeypatch: pytest.MonkeyPatch) -> "Begun":
        ends: TurnEnds = self.runner.scheduler.transfers.turn_ends
        begin_with = ends.begin_with

        def listening(kv: Any, anchor: Anchor) -> None:
            self.num_tokens.setdefault(kv.request_id, anchor.copy.num_tokens)
            begin_with(kv, anchor)

        monkeypatch.setattr(ends, "begin_with", listening)
        return self


@pytest.fixture
def begun(named: Named, monkeypatch: pytest.MonkeyPatch) -> Begun:
    _, runner = named
    monkeypatch.setattr(runner.scheduler.line.resumes, "choose_way", random_way(1, KEEPING))
    return Begun(runner).listen(monkeypatch)


def expected_of(named: Named) -> tuple[Outcome, list[Arrival]]:
    expected = kind_reference(named[0])["conversations"]
    return expected, conversations(expected.tokens)


def alone_in_the_pool(named: Named) -> tuple[Outcome, list[Arrival]]:
    """Return two conversations, a turn of one after a turn of the other, and a branch."""
    expected, turns = expected_of(named)
    first = [turn for turn in turns if turn.request_id[:2] == "c0" or turn.request_id == BRANCH]
    other = [turn for turn in turns if turn.request_id[:2] == "c4"]
    chosen = [replace(turn, step=4 * turn.step) for turn in first]
    chosen += [replace(turn, step=4 * turn.step + 8 * NUM_ANSWER_TOKENS) for turn in other]
    return expected, chosen


def follow_ups(turns: Sequence[Arrival]) -> dict[str, int]:
    """Return the tokens of each turn behind a first one that the turn before it left."""
    lengths = {turn.request_id: len(turn.prompt) + NUM_ANSWER_TOKENS for turn in turns}
    names = {turn.request_id: turn.request_id for turn in turns} | {BRANCH: "c0.3", TWIN: "c1.2"}
    numbers = {name: (of[:-1], int(of[-1])) for name, of in names.items() if name != SALTED}
    return {n: lengths[f"{of}{turn - 1}"] for n, (of, turn) in numbers.items() if turn}


def test_turns_begin_at_the_very_token_at_which_the_last_one_ended(
    named: Named, begun: Begun
) -> None:
    """As soon as it is on the host: each comes when the one before it has long ended."""
    _, runner = named
    expected, turns = expected_of(named)
    turns = [replace(turn, step=SPREAD * turn.step) for turn in turns]

    outcome = runner.run(turns, hook=together(churn(1, share=0.2), copies_complete))

    assert first_difference(expected, outcome) == {}
    # Of the last token of an answer there is no KV.
    assert begun.num_tokens == {n: number - 1 for n, number in follow_ups(turns).items()}
    assert_pool_is_whole(runner)


@TWO_KINDS
def test_turns_take_what_the_pool_still_has_of_an_anchor(
    named: Named, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, states and open blocks, as they are. A second one that begins there copies them."""
    _, runner = named
    found = listen_to_found(runner, monkeypatch)
    expected, turns = alone_in_the_pool(named)

    outcome = runner.run(turns, hook=copies_complete)

    assert_tokens(expected, outcome, turns)
    assert sum(map(is_whole, found)) >= 2
    assert not all(map(is_whole, found)), "two began with one anchor, and both have its blocks"
    assert_pool_is_whole(runner)


@TWO_KINDS
def test_a_turn_waits_for_the_one_before_it_that_is_on_its_way_to_the_host(
    named: Named, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comes in the very step in which the one before it ends."""
    _, runner = named
    monkeypatch.setattr(runner.scheduler.line, "_rates", Rates)  # a machine may be busy
    expected, turns = expected_of(named)
    first, second = (turn for turn in turns if turn.request_id in ("c3.0", "c3.1"))
    ended = first.step + 1 + NUM_ANSWER_TOKENS  # its prompt takes one step
    waits = [
        replace(second, request_id=f"c3.1 after {later}", step=ended + later) for later in range(4)
    ]
    for turn in waits:
        runner.scheduler.reset_prefix_cache()
        begun.num_tokens.clear()

        outcome = runner.run([first, turn])

        assert outcome.tokens[turn.request_id] == expected.tokens["c3.1"]
        assert begun.num_tokens == {turn.request_id: len(first.prompt) + NUM_ANSWER_TOKENS - 1}
    assert_pool_is_whole(runner)


@TWO_KINDS
def test_with_little_room_on_the_host_anchors_are_evicted_and_turns_stay_exact(
    named: Named, begun: Begun
) -> None:
    _, runner = named
    owner = runner.scheduler.block_owner
    expected, turns = expected_of(named)
    counters = owner.counters
    before = counters.copy()
    with room_for(runner, 60):
        for seed in range(MAX_ROUNDS):
            outcome = runner.run(turns, hook=churn(seed, share=0.1))

            assert first_difference(expected, outcome) == {}
            if counters.num_evicted_columns - before.num_evicted_columns >= 20:
                break
    assert counters.num_evicted_columns - before.num_evicted_columns >= 20
    assert counters.num_evicted_anchors > before.num_evicted_anchors
    assert begun.num_tokens
    assert_pool_is_whole(runner)


@TWO_KINDS
def test_aborted_turns_leave_the_others_exact(named: Named, begun: Begun) -> None:
    _, runner = named
    expected, turns = expected_of(named)
    workload = with_aborts(turns, seed=5, share=0.3)

    outcome = runner.run(workload, hook=churn(5, share=0.1))

    assert_tokens(expected, outcome, workload)
    assert begun.num_tokens
    assert_pool_is_whole(runner)


@TWO_KINDS
def test_a_reset_lets_no_turn_begin_with_what_was_there(named: Named, begun: Begun) -> None:
    _, runner = named
    expected, turns = expected_of(named)

    outcome = runner.run(turns, hook=lambda scheduler, step: scheduler.reset_prefix_cache())

    assert first_difference(expected, outcome) == {}
    assert not begun.num_tokens
    assert_pool_is_whole(runner)


Found = list[KVCacheBlock | None]


def listen_to_found(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> list[Found]:
    """Return what will have been found of anchors in the pool, each time that one is looked for."""
    blocks, everything = runner.scheduler.block_owner.blocks, list[Found]()
    find_anchor = blocks.find_anchor

    def listening(anchor: Anchor) -> Found:
        everything.append(find_anchor(anchor))
        return everything[-1]

    monkeypatch.setattr(blocks, "find_anchor", listening)
    return everything


def is_whole(found: Found) -> bool:
    return all(block is not None for block in found)


# -- what is wrong is noticed --------------------------------------------------------------------


def differing(named: Named) -> set[str]:
    """Return whose tokens differ, of turns with all layers on the host: nothing is found there."""
    _, runner = named
    expected, turns = expected_of(named)
    everything = frozenset(range(num_groups(runner.case)))
    away = fixed({turn.request_id: everything for turn in turns})
    outcome = runner.run(turns, hook=together(away), check=False)
    return set(first_difference(expected, outcome))


@TWO_KINDS
def test_an_anchor_of_another_conversation_is_noticed(
    named: Named, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: TurnEnds = named[1].scheduler.transfers.turn_ends
    begin_with, copies = ends.begin_with, list[Any]()

    def with_another(kv: Any, anchor: Anchor) -> None:
        copies.append(anchor.copy)
        begin_with(kv, anchor)
        shapes = [[len(slots) for slots in copy.slots] for copy in (copies[0], anchor.copy)]
        slots, uids = kv.side_copy.slots, kv.side_copy.uids
        if shapes[0] == shapes[1]:
            slots, uids = copies[0].slots, copies[0].uids
        elif copies[0].slots[-1]:  # the last group's: a window's newest block, or a state
            last = len(slots[-1])
            slots = [*slots[:-1], [copies[0].slots[-1][-1]] * last]
            uids = [*uids[:-1], [copies[0].uids[-1][-1]] * last]
        kv.side_copy = replace(kv.side_copy, slots=slots, uids=uids)

    monkeypatch.setattr(ends, "begin_with", with_another)

    wrong = differing(named)

    assert len(copies) >= 10
    assert len(wrong) >= 5
    assert wrong <= begun.num_tokens.keys()


@TWO_KINDS
@pytest.mark.parametrize("is_guarded", [False, True])
def test_blocks_of_another_anchor_are_noticed(
    named: Named, begun: Begun, monkeypatch: pytest.MonkeyPatch, is_guarded: bool
) -> None:
    """What a request leaves in the pool is taken for what the next one that ends has left.

    Where the integrity guard looks, whoever begins with it is computed anew.
    """
    _, runner = named
    expected, turns = alone_in_the_pool(named)
    found, blocks = listen_to_found(runner, monkeypatch), runner.scheduler.block_owner.blocks
    leave_anchor, last = blocks.leave_anchor, list[Sequence[KVCacheBlock]]()

    def leave_the_last(anchor: Anchor, held: Sequence[KVCacheBlock]) -> None:
        if last and len(last[0]) == len(held):
            last.append(held)
            held = last.pop(0)
        if last:
            leave_anchor(anchor, held)
        else:
            last.append(held)

    monkeypatch.setattr(blocks, "leave_anchor", leave_the_last)
    counters = runner.scheduler.block_owner.counters
    num_before = counters.num_losses_corrupt
    with nullcontext() if is_guarded else faults.spoiling(faults.FaultyEngine):
        outcome = runner.run(turns, hook=copies_complete, check=False)
    blocks.release(last.pop())

    assert any(map(is_whole, found))
    wrong = {turn.request_id for turn in turns} & first_difference(expected, outcome).keys()
    is_noticed = counters.num_losses_corrupt > num_before
    assert (bool(wrong), is_noticed) == (not is_guarded, is_guarded)
    assert wrong <= begun.num_tokens.keys()


@TWO_KINDS
def test_an_anchor_of_another_number_of_tokens_is_noticed(
    named: Named, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken for one of a token less: windows and states run ahead of the request."""
    ends: TurnEnds = named[1].scheduler.transfers.turn_ends
    begin_with = ends.begin_with

    def one_less(kv: Any, anchor: Anchor) -> None:
        begin_with(kv, anchor)
        size = named[1].scheduler.block_owner.geometry.block_size
        if anchor.copy.num_tokens % size > 1:
            kv.side_copy = replace(kv.side_copy, num_tokens=anchor.copy.num_tokens - 1)

    monkeypatch.setattr(ends, "begin_with", one_less)

    wrong = differing(named)

    # A window's token is written anew, with the same KV: only states notice.
    assert bool(wrong) == (named[0] == "granite4")
    assert wrong <= begun.num_tokens.keys()


@TWO_KINDS
def test_tokens_behind_the_last_full_block_that_are_not_compared_are_noticed(
    named: Named, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests share their full blocks and no more; the second one begins with the first's."""
    _, runner = named
    size, ends = (
        runner.scheduler.block_owner.geometry.block_size,
        runner.scheduler.transfers.turn_ends,
    )
    prompt = make_prompt(size + size // 2, seed=7)
    other = [*prompt[:size], *make_prompt(size, seed=8)]
    first = Arrival(request_id="first", prompt=prompt, num_output_tokens=4)
    second = Arrival(request_id="second", prompt=other, num_output_tokens=30, step=60)
    right = runner.run([first, second])
    assert not begun.num_tokens

    def as_if_they_were_its(columns: Any, token_ids: Any) -> tuple[int, Anchor | None]:
        found = [
            (n, a) for n, c in enumerate(columns, 1) for a in ends._cache.anchors.behind(c.key)
        ]
        return found[-1] if found else (0, None)

    monkeypatch.setattr(ends, "find", as_if_they_were_its)

    outcome = runner.run([first, second], check=False)

    assert "second" in begun.num_tokens
    assert set(first_difference(right, outcome)) == {"second"}
