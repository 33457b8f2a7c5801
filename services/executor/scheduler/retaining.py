"""What of requests' KV stays in the prefix cache because their clients asked for it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from vllm.v1.request import Request, RequestStatus

from services.control.prefix_cache import num_complete
from services.control.retention import RetainingSession, RetentionBudget
from services.executor.blocks.block_owner import BlockOwner
from services.executor.kv_holders import HoldingSession
from services.executor.kv_options import KVOptions
from services.executor.request_tag import KeptTokens, kept_of, retained_to_params
from services.generation.retention import (
    RejectedRetention,
    Retained,
    RetainedSpan,
    RetentionStatus,
)

MAX_COUNTED_COLUMNS = 1 << 14  # for one account of sessions
UNTOLD = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


class Retaining:
    """Answers hints twice: about the prompt with the first token, about all at the end.

    The first answer is for clients whose answer ends in the front, by a stop string; the scheduler
    hears of that end later.
    """

    def __init__(self, owner: BlockOwner, options: KVOptions) -> None:
        self._owner, self._options = owner, options
        self._retention = owner.host.cache.retention
        self._begun: set[str] = set()  # requests whose prompt was answered for
        self._told: dict[str, dict[str, Any]] = {}  # of requests that end with this step

    def advance(self, now_s: float) -> None:
        """Let end what was retained until now, before a step."""
        self._told.clear()
        self._retention.advance(now_s)

    def begun(self, request: Request, now_s: float) -> dict[str, Any]:
        """Return what an output with tokens of a request that goes on is to carry."""
        if request.request_id in self._begun or (kept := _kept(request)) is None:
            return {}
        self._begun.add(request.request_id)
        return retained_to_params(self._retain(request, kept, request.num_prompt_tokens, now_s))

    def ended(self, request: Request, now_s: float) -> None:
        """Retain what is asked for of a request whose KV is about to be freed."""
        kept = _kept(request)
        if kept is None:
            return
        self._begun.discard(request.request_id)
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)  # of the last no KV
        retained = self._retain(request, kept, num_tokens, now_s)
        self._owner.counters.count_retention(retained.status.value)
        if request.status not in UNTOLD:
            self._told[request.request_id] = retained_to_params(retained)

    def told(self, request_id: str) -> dict[str, Any]:
        """Return what the last output of a request that has ended is to carry."""
        return self._told.pop(request_id, {})

    def release(self, account: str, session_id: str) -> int:
        """Retain nothing for a session any more; return how many tokens it retained."""
        return self._retention.release(account, session_id) * self._owner.geometry.block_size

    def sessions(self, limit: int, now_s: float) -> list[HoldingSession]:
        """Return the sessions that most is retained for, most first. Costs a look-up for each of
        their columns, of which MAX_COUNTED_COLUMNS are looked up: larger ones have fewer figures.
        """
        self._retention.advance(now_s)
        held, num_left = list[HoldingSession](), MAX_COUNTED_COLUMNS
        for one in self._retention.largest(limit):
            is_counted = one.num_columns <= num_left
            num_left -= one.num_columns if is_counted else 0
            held.append(self._held(one, now_s, is_counted=is_counted))
        return held

    def _held(self, session: RetainingSession, now_s: float, *, is_counted: bool) -> HoldingSession:
        block_size = self._owner.geometry.block_size
        held = HoldingSession(
            account=session.account,
            session_id=session.session,
            num_retained_tokens=session.num_columns * block_size,
        )
        if not is_counted:
            return held
        cache, num_in_pool, num_on_host, last_s = self._owner.host.cache, 0, 0, now_s
        for key, until_s in self._retention.columns(session.account, session.session):
            last_s = max(last_s, until_s)
            if (column := cache.get(key)) is not None:
                num_in_pool += column.is_in_pool
                num_on_host += column.is_complete
        return replace(
            held,
            num_pool_tokens=num_in_pool * block_size,
            num_host_tokens=num_on_host * block_size,
            retained_for_s=last_s - now_s,
        )

    @property
    def num_sessions(self) -> int:
        """Return how many sessions something is retained for."""
        return self._retention.num_sessions

    def _retain(
        self, request: Request, kept: KeptTokens, num_tokens: int, now_s: float
    ) -> Retained:
        reason = self._why_not(request, num_tokens)
        if reason is not None:
            return Retained(status=RetentionStatus.REJECTED, reason=reason)
        self._retention.advance(now_s)
        block_size = self._owner.geometry.block_size
        num_full = min(num_tokens // block_size, len(request.block_hashes))
        ends = [min((end or num_tokens) // block_size, num_full) for end, _ in kept.spans]
        seconds = [one for _, one in kept.spans]
        columns = list(_columns(request.block_hashes, ends, seconds, now_s))
        num_held = self._retention.hold(kept.account, kept.session_id, columns, self._budget)
        spans = tuple(
            RetainedSpan(end=min(end, num_held) * block_size, retention_s=one)
            for (before, end), one in zip(pairwise([0, *ends]), seconds, strict=True)
            if before < min(end, num_held)
        )
        keys = request.block_hashes[:num_held]
        if num_held < len(columns):
            status = RetentionStatus.CLIPPED
        elif num_complete(self._owner.host.cache.find(keys)) < num_held:
            status = RetentionStatus.DEFERRED
        else:
            status = RetentionStatus.ACCEPTED
        return Retained(status=status, spans=spans)

    def _why_not(self, request: Request, num_tokens: int) -> RejectedRetention | None:
        if self._owner.side_copies.are_needed:
            return RejectedRetention.MODEL_KIND
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


def _columns(
    keys: Sequence[Any], ends: Sequence[int], seconds: Sequence[float], now_s: float
) -> Iterator[tuple[Any, float]]:
    """Yield each column that is to be kept, and until when."""
    for (first, end), one in zip(pairwise([0, *ends]), seconds, strict=True):
        for position in range(first, end):
            yield keys[position], now_s + one
