"""How long clients' tools take, by key and tool: for about so long KV is kept. No I/O.

A wait is the time from the end of an answer with a call to the arrival of the request that brings
the call's result. Calls are known by their ids, which answers tell and requests give back.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Generic, TypeVar

from services.executor.metrics import TOOL_WAITS
from services.executor.types import Submission
from services.generation.conversation import ToolCall
from services.generation.prompts import ChatPrompt, Prompt
from services.kit.capped_labels import CappedLabels
from services.kit.clock import Clock

QUANTILE = 0.9
DEFAULT_WAIT_S = 60.0  # of a key of which too little is known
MIN_WAITS = 4  # that a quantile is taken of
MAX_WAITS = 64  # the newest, of a tool or a key
MAX_TOOLS = 4_096  # of all keys; a tool that was not called for longest is forgotten
MAX_KEYS = 1_024
MAX_PENDING = 8_192  # calls without a result; the oldest is forgotten
MAX_LABELS = 64  # tools by name in metrics, those that came first

KeyT = TypeVar("KeyT", bound=Hashable)


class WaitBook(Generic[KeyT]):
    """The newest waits by key, of the keys that had one last."""

    def __init__(self, *, max_keys: int) -> None:
        self._max_keys = max_keys
        self._waits_s: OrderedDict[KeyT, deque[float]] = OrderedDict()

    def add(self, key: KeyT, wait_s: float) -> None:
        self._waits_s.setdefault(key, deque(maxlen=MAX_WAITS)).append(wait_s)
        self._waits_s.move_to_end(key)
        if len(self._waits_s) > self._max_keys:
            self._waits_s.popitem(last=False)

    def quantile_s(self, key: KeyT) -> float | None:
        """Return the least wait that QUANTILE of a key's newest ones do not exceed; None if they
        are too few.
        """
        waits_s = sorted(self._waits_s.get(key, ()))
        if len(waits_s) < MIN_WAITS:
            return None
        return waits_s[ceil(QUANTILE * len(waits_s)) - 1]


@dataclass(frozen=True, slots=True)
class _PendingTurn:
    """An answer that ended with calls of tools."""

    ended_s: float
    account: str
    tools: frozenset[str]


class ToolWaits:
    """Measures waits, and says how long the KV of an answer with calls is to be kept."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: OrderedDict[Hashable, _PendingTurn] = OrderedDict()  # by call
        self._by_tool = WaitBook[tuple[str, str]](max_keys=MAX_TOOLS)
        self._by_account = WaitBook[str](max_keys=MAX_KEYS)
        self._labels = CappedLabels(MAX_LABELS)

    def arrived(self, submission: Submission) -> None:
        """Take in that a request has come, maybe with the results of calls."""
        ids = _last_calls(submission.prompt)
        calls = [self._pending.pop(call, None) for call in _calls(submission, ids)]
        for turn in {turn for turn in calls if turn is not None}:
            self._waited(turn, self._clock() - turn.ended_s)

    def _waited(self, turn: _PendingTurn, wait_s: float) -> None:
        self._by_account.add(turn.account, wait_s)
        for tool in turn.tools:
            self._by_tool.add((turn.account, tool), wait_s)
            TOOL_WAITS.labels(self._labels.label(tool)).observe(wait_s)

    def ended(self, submission: Submission, calls: Sequence[ToolCall]) -> float:
        """Take in that an answer has ended with calls; return in how many seconds the result of the
        slowest of them is likely to have come.
        """
        account = submission.retention.account if submission.retention else ""
        turn = _PendingTurn(self._clock(), account, frozenset(call.name for call in calls))
        for call in _calls(submission, [call.id for call in calls]):
            self._pending[call] = turn
            self._pending.move_to_end(call)
        while len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)
        return max(self._likely_s(account, tool) for tool in turn.tools)

    def _likely_s(self, account: str, tool: str) -> float:
        of_tool = self._by_tool.quantile_s((account, tool))
        if of_tool is not None:
            return of_tool
        of_account = self._by_account.quantile_s(account)
        return DEFAULT_WAIT_S if of_account is None else of_account


def _last_calls(prompt: Prompt) -> Sequence[str]:
    """Return the ids of the calls of a conversation's last answer."""
    if not isinstance(prompt, ChatPrompt):
        return ()
    answers = (one for one in reversed(prompt.messages) if one.role == "assistant")
    answer = next(answers, None)
    return () if answer is None else [call.id for call in answer.tool_calls]


def _calls(submission: Submission, ids: Sequence[str]) -> Iterator[Hashable]:
    """Yield what tells each call from those of other clients and conversations: some models count
    their calls, so that ids alone do not.
    """
    prompt = submission.prompt
    if ids and isinstance(prompt, ChatPrompt):
        first = next((one.content for one in prompt.messages if one.role == "user"), "")
        conversation = (submission.cache_salt, hash(first))
        yield from ((conversation, id) for id in ids)
