"""What of requests' KV stays in the prefix cache because their clients asked for it, or because the
answer ended with a tool call.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from vllm.v1.request import Request, RequestStatus

from services.control.prefixes.anchors import AnchorShare
from services.control.prefixes.prefix_cache import num_complete
from services.control.prefixes.retention import RetentionBudget
from services.executor.blocks.transfers.transfers import Transfers
from services.executor.kv_holders import HoldingSession
from services.executor.kv_options import KVOptions
from services.executor.request_tag import (
    KeptTokens,
    ToolTurn,
    kept_of,
    retained_to_params,
    tool_turn_of,
)
from services.generation.retention import (
    RejectedRetention,
    Retained,
    RetainedSpan,
    RetentionStatus,
)
from services.placement.blocks import side_copy_positions

MAX_ENDED_TURNS = 256  # of which the front may still say that they ended with a tool call
MAX_COUNTED_COLUMNS = 1 << 14  # for one account of sessions
UNTOLD = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


@dataclass(frozen=True, slots=True)
class _EndedTurn:
    """What a request that may call tools leaves in the cache."""

    turn: ToolTurn
    keys: Sequence[Any]  # of its full blocks
    num_tokens: int  # that have KV


class Retaining:
    """Answers hints twice: about the prompt with the first token, about all at the end.

    The first answer is for clients whose answer ends in the front, by a stop string; the scheduler
    hears of that end later. That an answer has ended with a tool call is known to the front alone,
    which says so behind the end, or ahead of it where it ends the answer itself.
    """

    def __init__(self, transfers: Transfers, options: KVOptions) -> None:
        self._transfers, self._options = transfers, options
        self._owner = owner = transfers.owner
        self._retention, self._awaited = owner.host.cache.retention, owner.host.cache.awaited
        self._books = (self._retention, self._awaited)
        self._begun: set[str] = set()  # requests whose prompt was answered for
        self._told: dict[str, dict[str, Any]] = {}  # of requests that end with this step
        self._ended_turns: OrderedDict[str, _EndedTurn] = OrderedDict()
        self._awaited_s: dict[str, float] = {}  # live requests that end with a tool call

    def advance(self, now_s: float, *, is_wanted: bool) -> None:
        """Let end what was retained until now, before a step.

        What is kept and has no copy is copied, and what waits for its next turn brought back, if
        the link and free blocks are not wanted otherwise.
        """
        self._told.clear()
        self._advance(now_s)
        owner, transfers = self._owner, self._transfers
        owner.late_copies.advance(is_wanted=is_wanted, budget=transfers.write_through.budget)
        owner.returns.advance(is_wanted=is_wanted, link_is_idle=transfers.link_is_idle)

    def _advance(self, now_s: float) -> None:
        for book in self._books:
            book.advance(now_s)

    def begun(self, request: Request, now_s: float) -> dict[str, Any]:
        """Return what an output with tokens of a request that goes on is to carry."""
        if request.request_id in self._begun or (kept := _kept(request)) is None:
            return {}
        self._begun.add(request.request_id)
        num_tokens = request.num_prompt_tokens
        return retained_to_params(self._retain(request, kept, num_tokens, now_s, is_end=False))

    def ended(self, request: Request, now_s: float) -> None:
        """Retain what is asked for of a request whose KV is about to be freed."""
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)  # of the last no KV
        self._note_turn(request, num_tokens, now_s)
        self._owner.returns.look_again()
        kept = _kept(request)
        if kept is None:
            return
        self._begun.discard(request.request_id)
        retained = self._retain(request, kept, num_tokens, now_s, is_end=True)
        self._owner.counters.count_retention(retained.status.value)
        if request.status not in UNTOLD:
            self._told[request.request_id] = retained_to_params(retained)

    def _note_turn(self, request: Request, num_tokens: int, now_s: float) -> None:
        awaited_s = self._awaited_s.pop(request.request_id, None)
        turn = tool_turn(request)
        if turn is None or self._why_not(request, num_tokens) is not None:
            return
        ended = _EndedTurn(turn, request.block_hashes, num_tokens)
        if awaited_s is not None:
            self._keep_turn(request.request_id, ended, now_s + awaited_s)
            return
        self._ended_turns[request.request_id] = ended
        if len(self._ended_turns) > MAX_ENDED_TURNS:
            self._ended_turns.popitem(last=False)

    def keep_turns(self, turns: Mapping[str, float], live: Container[str], now_s: float) -> None:
        """Keep what the next turns begin with, for so many seconds each from now on: these requests
        end with tool calls. Those in `live` have not ended yet.
        """
        self._advance(now_s)
        for request_id, seconds in turns.items():
            if (ended := self._ended_turns.pop(request_id, None)) is not None:
                self._keep_turn(request_id, ended, now_s + seconds)
            elif request_id in live:
                self._awaited_s[request_id] = seconds

    def _keep_turn(self, request_id: str, ended: _EndedTurn, until_s: float) -> None:
        """Keep a turn as far as the account's budget goes beside what it asked for."""
        turn, block_size = ended.turn, self._owner.geometry.block_size
        end = min(turn.end or ended.num_tokens, ended.num_tokens)
        cache, budget = self._owner.host.cache, self._budget
        if self._needs_anchors:
            columns = self._to_anchor(ended.keys, end, until_s)
            left = budget - self._retention.used(turn.account)
            if self._awaited.num_within(turn.account, columns, left) < len(columns):
                return
        else:
            columns = [(key, until_s) for key in ended.keys[: end // block_size]]
        num_held = cache.retain_awaited(turn.account, turn.session_id, columns, budget)
        self._owner.counters.num_kept_tool_turns += num_held > 0
        keys = [key for key, _ in columns[:num_held] if not isinstance(key, AnchorShare)]
        self._copy_late(keys, num_copied=num_complete(cache.find(keys)))
        self._owner.returns.await_turn((turn.account, turn.session_id or request_id), keys)

    def _copy_late(self, keys: Sequence[Hashable], *, num_copied: int) -> None:
        if self._options.max_mirrored_blocks_per_step:
            self._owner.late_copies.add(keys, num_copied=num_copied)

    def told(self, request_id: str) -> dict[str, Any]:
        """Return what the last output of a request that has ended is to carry."""
        return self._told.pop(request_id, {})

    def release(self, account: str, session_id: str) -> int:
        """Retain nothing for a session any more; return how many tokens it retained."""
        keys = {
            key
            for book in self._books
            for key in book.keys_of(account, session_id)
            if not isinstance(key, AnchorShare)
        }
        for book in self._books:
            book.release(account, session_id)
        return len(keys) * self._owner.geometry.block_size

    def forget_all(self) -> None:
        """Let no request begin with what was computed until now, nor let any of it be retained."""
        self._ended_turns.clear()
        self._owner.forget_prefixes()

    def sessions(self, limit: int, now_s: float) -> list[HoldingSession]:
        """Return the sessions that most is kept for, most first. Costs a look-up for each of their
        columns, of which MAX_COUNTED_COLUMNS are looked up: larger ones have fewer figures.
        """
        self._advance(now_s)
        sizes = Counter[tuple[str, str]]()
        for book in self._books:
            for one in book.largest(limit):
                sizes[one.account, one.session] += one.num_columns
        held, num_left = list[HoldingSession](), MAX_COUNTED_COLUMNS
        for (account, session), num_columns in sizes.most_common(limit):
            kept = HoldingSession(
                account=account,
                session_id=session,
                num_retained_tokens=num_columns * self._owner.geometry.block_size,
            )
            if num_columns <= num_left:
                num_left -= num_columns
                kept = self._counted(kept, now_s)
            held.append(kept)
        return held

    def _columns(self, account: str, session: str) -> dict[Hashable, int]:
        """Return the columns that are kept for a session, and until when."""
        until_s: dict[Hashable, int] = {}
        for book in self._books:
            for key, second in book.columns(account, session):
                if not isinstance(key, AnchorShare):
                    until_s[key] = max(second, until_s.get(key, second))
        return until_s

    def _counted(self, session: HoldingSession, now_s: float) -> HoldingSession:
        columns = self._columns(session.account, session.session_id)
        block_size, cache = self._owner.geometry.block_size, self._owner.host.cache
        there = [column for key in columns if (column := cache.get(key)) is not None]
        return replace(
            session,
            num_retained_tokens=len(columns) * block_size,
            num_pool_tokens=sum(column.is_in_pool for column in there) * block_size,
            num_host_tokens=sum(column.is_complete for column in there) * block_size,
            retained_for_s=max((now_s, *columns.values())) - now_s,
        )

    @property
    def num_sessions(self) -> int:
        """Return how many sessions something is kept for."""
        return len({name for book in self._books for name in book.sessions})

    def _retain(
        self, request: Request, kept: KeptTokens, num_tokens: int, now_s: float, *, is_end: bool
    ) -> Retained:
        reason = self._why_not(request, num_tokens)
        if reason is not None:
            return Retained(status=RetentionStatus.REJECTED, reason=reason)
        self._retention.advance(now_s)
        if self._needs_anchors:
            return self._retain_to_anchor(request, kept, num_tokens, now_s, is_end=is_end)
        block_size = self._owner.geometry.block_size
        num_full = min(num_tokens // block_size, len(request.block_hashes))
        ends = [min((end or num_tokens) // block_size, num_full) for end, _ in kept.spans]
        seconds = [one for _, one in kept.spans]
        columns = list(_columns(request.block_hashes, ends, seconds, now_s))
        cache, budget = self._owner.host.cache, self._budget
        num_held = cache.retain(kept.account, kept.session_id, columns, budget)
        spans = tuple(
            RetainedSpan(end=min(end, num_held) * block_size, retention_s=one)
            for (before, end), one in zip(pairwise([0, *ends]), seconds, strict=True)
            if before < min(end, num_held)
        )
        keys = request.block_hashes[:num_held]
        num_copied = num_complete(cache.find(keys))
        if is_end:
            self._copy_late(keys, num_copied=num_copied)
        if num_held < len(columns):
            status = RetentionStatus.CLIPPED
        elif num_copied < num_held:
            status = RetentionStatus.DEFERRED
        else:
            status = RetentionStatus.ACCEPTED
        return Retained(status=status, spans=spans)

    def _retain_to_anchor(
        self, request: Request, kept: KeptTokens, num_tokens: int, now_s: float, *, is_end: bool
    ) -> Retained:
        """The same where requests begin at anchors alone: all up to one, or nothing; once it is
        made.

        Requests leave them where they end, and those that may call tools where their prompts do.
        """
        asked_end, seconds = kept.spans[-1]
        end = min(asked_end or num_tokens, num_tokens)
        at_prompts_end = end == request.num_prompt_tokens and tool_turn(request) is not None
        if end < num_tokens and not at_prompts_end:
            return Retained(status=RetentionStatus.REJECTED, reason=RejectedRetention.MODEL_KIND)
        columns, budget = self._to_anchor(request.block_hashes, end, now_s + seconds), self._budget
        if not columns:
            return Retained(status=RetentionStatus.ACCEPTED)
        if self._retention.num_within(kept.account, columns, budget) < len(columns):
            return Retained(status=RetentionStatus.CLIPPED)
        if is_end:
            self._owner.host.cache.retain(kept.account, kept.session_id, columns, budget)
        is_all = len(kept.spans) == 1
        return Retained(
            status=RetentionStatus.DEFERRED if is_all else RetentionStatus.CLIPPED,
            spans=(RetainedSpan(end=end, retention_s=seconds),),
        )

    def _to_anchor(
        self, keys: Sequence[Any], end: int, until_s: float
    ) -> list[tuple[Hashable, float]]:
        """Return what is kept up to an anchor, which takes as much as so many columns."""
        geometry = self._owner.geometry
        num_full = min(end // geometry.block_size, len(keys))
        if not num_full:
            return []
        num_slots = sum(map(len, side_copy_positions(geometry, num_tokens=end)))
        num_shares = -(-num_slots // geometry.num_groups)
        shares = (AnchorShare(keys[num_full - 1], n) for n in range(num_shares))
        return [(key, until_s) for key in (*keys[:num_full], *shares)]

    @property
    def _needs_anchors(self) -> bool:
        return self._owner.side_copies.are_needed

    def _why_not(self, request: Request, num_tokens: int) -> RejectedRetention | None:
        if not self._options.prefix_caching or not self._owner.host.num_slots:
            return RejectedRetention.NO_HOST_CACHE
        if num_tokens >= self._owner.geometry.block_size and not request.block_hashes:
            return RejectedRetention.KV_LOST
        return None

    @property
    def _budget(self) -> RetentionBudget:
        """Return what an account may retain: a share of the host, for so long as that allows."""
        num_columns = self._owner.host.num_slots / self._owner.geometry.num_groups
        return RetentionBudget(
            num_columns=int(num_columns * self._options.retention_frac),
            column_s=num_columns * self._options.retention_host_s,
        )


def _kept(request: Request) -> KeptTokens | None:
    params = request.sampling_params
    return kept_of(params and params.extra_args)


def tool_turn(request: Request) -> ToolTurn | None:
    """Return what is kept of a request if its answer calls tools; None if it cannot."""
    params = request.sampling_params
    return tool_turn_of(params and params.extra_args)


def _columns(
    keys: Sequence[Any], ends: Sequence[int], seconds: Sequence[float], now_s: float
) -> Iterator[tuple[Any, float]]:
    """Yield each column that is to be kept, and until when."""
    for (first, end), one in zip(pairwise([0, *ends]), seconds, strict=True):
        for position in range(first, end):
            yield keys[position], now_s + one
