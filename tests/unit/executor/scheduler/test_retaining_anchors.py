"""Hints and tool turns where requests begin at anchors alone: all up to one is kept, or nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from services.control.prefixes.anchors import Anchor
from services.control.prefixes.prefix_cache import Column
from services.executor.blocks.host_pool import SlotPromise
from services.executor.blocks.residency import RequestKV
from services.executor.kv_options import KVOptions
from services.executor.request_tag import (
    KeptTokens,
    ToolTurn,
    retained_from_params,
    with_kept,
    with_tool_turn,
)
from services.executor.scheduler.retaining import Retaining
from services.generation.retention import RejectedRetention, Retained, RetentionStatus
from tests.unit.executor.blocks.transfers.test_prompt_ends import PromptRig
from tests.unit.executor.blocks.transfers.test_turn_ends import NUM_GROUPS, SIZE, TOKENS, keys

pytestmark = pytest.mark.filterwarnings("default")

NUM_TOKENS, NUM_PROMPT = 30, 21
NUM_SLOTS, NUM_FULL = 400, 7  # of the host; blocks of a turn
NUM_SHARES = 3  # columns, of four slots, that an anchor weighs: 2 + 3 of windows, a state, 4 open
WHOLE = (0, 600.0)


class Rig(PromptRig):
    def __init__(self, *, retention_frac: float = 1.0) -> None:
        super().__init__()
        options = KVOptions(host_bytes=1 << 20, prefix_caching=True, retention_frac=retention_frac)
        self.retaining = Retaining(self.sim.transfers, options)
        self.cache = self.sim.owner.host.cache

    def request(self, kv: RequestKV, *spans: tuple[int, float], calls: bool = False) -> Any:
        kept = KeptTokens("alice", "s", list(spans))
        extra_args = with_kept({}, kept) if spans else {}
        if calls:
            extra_args = with_tool_turn(extra_args, ToolTurn("alice", "s", 0))
        return SimpleNamespace(
            request_id=kv.request_id,
            num_prompt_tokens=NUM_PROMPT,
            num_computed_tokens=NUM_TOKENS,
            num_tokens=NUM_TOKENS + 1,
            block_hashes=keys(NUM_FULL),
            sampling_params=SimpleNamespace(extra_args=extra_args),
            status=RequestStatus.FINISHED_LENGTH_CAPPED,
        )

    def end_with(self, *spans: tuple[int, float], calls: bool = False) -> Retained | None:
        """Have a request end, and return what its client is told."""
        kv = self.begin(NUM_TOKENS)
        request = self.request(kv, *spans, calls=calls)
        self.retaining.ended(request, 0.0)
        self.end(kv)
        self.settle()
        return retained_from_params(self.retaining.told(kv.request_id))

    @property
    def found(self) -> tuple[int, Anchor | None]:
        return self.find(TOKENS)


def test_a_turn_is_kept_with_its_anchor_once_it_is_on_the_host() -> None:
    rig = Rig()

    told = rig.end_with(WHOLE)

    assert told is not None
    assert told.status is RetentionStatus.DEFERRED
    assert [(one.end, one.retention_s) for one in told.spans] == [(NUM_TOKENS, 600.0)]
    assert rig.found[0] == NUM_FULL
    assert rig.cache.num_retained_columns == NUM_FULL + NUM_SHARES


def test_it_goes_after_what_nobody_asked_for() -> None:
    rig = Rig()
    rig.end_with(WHOLE)
    turn, cache = rig.found, rig.cache
    other = Column("other", tuple(rig.sim.owner.host.take(SlotPromise(), NUM_GROUPS) or ()), uid=0)
    cache.publish(other)
    rig.sim.owner.host.release([other])  # used later than the turn's

    assert len(cache.evict(1)) == NUM_GROUPS

    assert cache.get("other") is None
    assert rig.found == turn
    rig.retaining.release("alice", "s")
    cache.evict(1)
    assert rig.found == (0, None)


@pytest.mark.parametrize(("num_lacking", "status"), [(0, "deferred"), (1, "clipped")])
def test_a_budget_counts_anchors_and_is_for_all_of_a_turn_or_nothing(
    num_lacking: int, status: str
) -> None:
    num_columns = NUM_FULL + NUM_SHARES
    rig = Rig(retention_frac=(num_columns - num_lacking) / (NUM_SLOTS // NUM_GROUPS))

    told = rig.end_with(WHOLE)

    assert told is not None
    assert (told.status.value, bool(told.spans)) == (status, not num_lacking)
    assert rig.cache.num_retained_columns == (0 if num_lacking else num_columns)


def test_a_part_of_a_turn_is_kept_only_where_a_prompt_ended_that_may_call_tools() -> None:
    rejected = Retained(status=RetentionStatus.REJECTED, reason=RejectedRetention.MODEL_KIND)
    assert Rig().end_with((NUM_PROMPT, 600.0)) == rejected
    assert Rig().end_with((SIZE, 600.0), calls=True) == rejected

    rig = Rig()
    told = rig.end_with((NUM_PROMPT, 600.0), calls=True)

    assert told is not None
    assert told.num_tokens == NUM_PROMPT
    assert rig.cache.num_retained_columns == NUM_PROMPT // SIZE + NUM_SHARES


def test_what_a_mark_before_the_last_one_asks_for_is_kept_no_longer_than_that() -> None:
    told = Rig().end_with((SIZE, 3_600.0), WHOLE)

    assert told is not None
    assert (told.status, told.retention_s) == (RetentionStatus.CLIPPED, 600.0)


def test_with_the_first_token_nothing_is_held_yet() -> None:
    rig = Rig()
    kv = rig.begin(NUM_TOKENS)

    told = retained_from_params(rig.retaining.begun(rig.request(kv, WHOLE), 0.0))

    assert told is not None
    assert (told.status, told.num_tokens) == (RetentionStatus.DEFERRED, NUM_PROMPT)
    assert rig.cache.num_retained_columns == 0


def test_a_turn_that_ends_with_a_tool_call_is_kept_until_it_is_released() -> None:
    rig = Rig()
    kv = rig.begin(NUM_TOKENS)
    rig.retaining.ended(rig.request(kv, calls=True), 0.0)
    rig.end(kv)
    rig.settle()

    rig.retaining.keep_turns({kv.request_id: 60.0}, (), 1.0)

    assert rig.cache.num_awaited_columns == NUM_FULL + NUM_SHARES
    (session,) = rig.retaining.sessions(9, 1.0)
    assert session.num_retained_tokens == session.num_host_tokens == NUM_FULL * SIZE
    assert rig.retaining.release("alice", "s") == NUM_FULL * SIZE
    assert rig.cache.num_awaited_columns == 0
