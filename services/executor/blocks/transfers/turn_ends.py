"""What a request that ends leaves for the next turn, where groups keep a window or a state.

It leaves as one that is parked does: what has no copy is copied with all that its next token
attends to. It keeps its blocks meanwhile, under its name, though the scheduler has forgotten it.
Its full blocks are columns of the prefix cache as in any model; the rest becomes an *anchor* behind
them. A request begins with the columns before the last anchor whose tokens are its own, and comes
back at the very token, as if it had been parked there.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from vllm.v1.core.kv_cache_utils import BlockHash

from services.control.prefixes.anchors import Anchor, ComingTurn
from services.control.prefixes.prefix_cache import Column, PrefixCache
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.residency import RequestKV, SideCopy, SideStage


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that has ended, and is on its way to the host."""

    kv: RequestKV
    tokens: tuple[int, ...]  # behind its last full block

    def is_continued_by(self, keys: Sequence[BlockHash], token_ids: Sequence[int]) -> bool:
        """Return whether a request's tokens begin with this one's, and there are more."""
        number, end = self.kv.num_full_blocks, self.kv.num_tokens
        if not self.kv.keys or number > len(keys) or end >= len(token_ids):
            return False
        if keys[number - 1] != self.kv.keys[number - 1]:
            return False
        return (*token_ids[end - len(self.tokens) : end],) == self.tokens


def anchor_at(kv: RequestKV, copy: SideCopy, cache: PrefixCache) -> Anchor | None:
    """Return the anchor that a copy can be; None as long as what precedes it is not on the host."""
    number = copy.num_tokens // kv.block_size
    if not kv.keys or len(kv.columns) < number:
        return None
    column = cache.get(kv.columns[number - 1].key)
    if column is None or not column.is_complete:
        return None
    return Anchor(key=column.key, tokens=copy.tokens, slots=(*copy.own_slots,), copy=copy)


class TurnEnds:
    """Makes anchors, and lets requests begin with them.

    ends.end(record, token_ids)  # before its blocks would be freed
    ends.advance()  # before each step
    ends.coming(keys, token_ids, num_found=0)  # what will be found, if it is worth waiting for
    num_columns, anchor = ends.find(columns, token_ids)
    ends.begin_with(kv, anchor)  # with the columns before it
    """

    def __init__(self, owner: BlockOwner, may_leave: Callable[[RequestKV], bool]) -> None:
        """`may_leave`: whether all that goes with a request is on the host, as at a park."""
        self._owner, self._may_leave = owner, may_leave
        self._cache = owner.host.cache
        self._turns: dict[str, Turn] = {}  # by request
        self._cache.needs_anchors = owner.side_copies.are_needed

    @property
    def is_busy(self) -> bool:
        """Whether copies of requests that have ended are under way."""
        return bool(self._turns)

    # -- a turn ends --------------------------------------------------------------------------

    def end(self, record: RequestRecord[RequestKV], token_ids: Sequence[int]) -> None:
        """Keep what a request has that ends, until it is on the host.

        Steps in flight may still compute the last of `token_ids`; not if they compute others.
        """
        kv = record.kv
        if kv is None or record.state.is_queued or not kv.mirrored or not kv.num_full_blocks:
            return
        if not kv.keys or kv.num_tokens > len(token_ids):
            return
        first = kv.num_full_blocks * kv.block_size
        kv.record, record.kv = replace(record), None
        kv.record.kv = kv
        if kv.record.state is not State.LEAVING:
            kv.record.enter(State.LEAVING)
        self._turns[kv.request_id] = Turn(kv, tuple(token_ids[first : kv.num_tokens]))

    def advance(self) -> None:
        """Let those go of which all is on the host, or something never will be."""
        for turn in list(self._turns.values()):
            if self._may_leave(turn.kv):
                self._publish(turn)
                self.drop([turn.kv.request_id])

    def _publish(self, turn: Turn) -> None:
        kv, copy = turn.kv, turn.kv.side_copy
        if copy is None or not self._owner.side_copies.is_kept(kv):
            return
        copy.tokens = turn.tokens
        anchor = anchor_at(kv, copy, self._cache)
        if anchor is None:
            return
        if kv.prompt_copy is not None:
            anchor.prompt = kv.prompt_copy.anchor
        if self._cache.anchors.publish(anchor):
            kv.side_copy = None  # its slots are the anchor's
            if all(group.offloaded for group in kv.groups):
                self._owner.side_copies.leave(kv, anchor)
            if kv.began is not None:
                self._cache.anchors.passed(kv.began)

    def drop(self, request_ids: Collection[str]) -> None:
        """Wait no longer for requests that have ended; others are passed over."""
        for request_id in request_ids:
            if (turn := self._turns.pop(request_id, None)) is not None:
                self._owner.forget(turn.kv)

    def has(self, request_id: str) -> bool:
        """Return whether a request has ended and is on its way to the host."""
        return request_id in self._turns

    def coming(
        self, keys: Sequence[BlockHash], token_ids: Sequence[int], *, num_found: int
    ) -> ComingTurn | None:
        """Return the longest turn under way that a request continues, beyond `num_found` tokens.

        `keys`: of the request's full blocks.
        """
        found = [one for one in self._turns.values() if one.is_continued_by(keys, token_ids)]
        last = max(found, key=lambda one: one.kv.num_tokens, default=None)
        if last is None or last.kv.num_tokens <= num_found:
            return None
        kv, copy = last.kv, last.kv.side_copy
        num_blocks = copy.num_blocks if copy and copy.stage is SideStage.LEAVES else 0
        num_blocks += sum(kv.num_full_blocks - group.num_saves_sent for group in kv.groups)
        return ComingTurn(kv.num_tokens, kv.num_tokens - num_found, num_blocks)

    # -- the next one begins ------------------------------------------------------------------

    def find(
        self, columns: Sequence[Column], token_ids: Sequence[int]
    ) -> tuple[int, Anchor | None]:
        """Return the last anchor whose tokens are a request's own, and how many columns precede it.

        At least one of its tokens is computed. There must be room for what no request uses.
        """
        size, num_left = self._owner.geometry.block_size, self._owner.host.num_unpromised
        idle = [0 if column.num_users else len(column.slots) for column in columns]
        num_idle = sum(idle)
        for number in range(len(columns), 0, -1):
            found = self._cache.anchors.behind(columns[number - 1].key)
            for anchor in sorted(found, key=lambda one: -len(one.tokens)):
                first, end = number * size, number * size + len(anchor.tokens)
                is_its = end < len(token_ids) and anchor.tokens == (*token_ids[first:end],)
                num_taken = num_idle + (0 if anchor.num_users else len(anchor.slots))
                if is_its and num_taken <= num_left:
                    return number, anchor
            num_idle -= idle[number - 1]
        return 0, None

    def begin_with(self, kv: RequestKV, anchor: Anchor) -> None:
        """Let a request that has the columns before an anchor begin behind it."""
        saved: SideCopy = anchor.copy
        self._cache.anchors.use(anchor)
        kv.began = anchor
        kv.side_copy = replace(saved, anchor=anchor, stage=SideStage.KEPT, targets=[], under_way={})
