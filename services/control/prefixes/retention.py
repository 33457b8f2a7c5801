"""What is kept in the prefix cache: which columns, on which account, until when.

A retained column goes after all others that none uses. It is retained by its hash, whether or not
it is on the host, and once for all sessions of an account, until the last of their times is over.
Times are whole seconds of one clock; they end when `advance` is told so.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from math import ceil, floor

UNNAMED = ""  # the session of what no session can release
MAX_SESSIONS = 64  # that a column is known to be retained by; others release nothing of it


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionBudget:
    """What one account may retain."""

    num_columns: int  # at once
    column_s: float  # columns times the seconds that they have to come

    def __sub__(self, used: "RetentionBudget") -> "RetentionBudget":
        """Return what is left of it; nothing where more is used."""
        return RetentionBudget(
            num_columns=max(0, self.num_columns - used.num_columns),
            column_s=max(0.0, self.column_s - used.column_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainingSession:
    """A session of an account, and what it retains."""

    account: str
    session: str
    num_columns: int


@dataclass(slots=True, eq=False)
class _Account:
    until_s: dict[Hashable, dict[str, int]] = field(default_factory=dict)  # by column and session
    columns_of: defaultdict[str, dict[Hashable, None]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # by session
    sum_until_s: int = 0  # over columns, of each one's last session

    def column_s(self, now_s: int) -> int:
        """Return the columns times the seconds that they have to come."""
        return self.sum_until_s - now_s * len(self.until_s)


class Retention:
    """The book of what is retained. Each change costs time by the columns that it is about."""

    def __init__(self, ended: Callable[[Hashable], None]) -> None:
        """`ended` hears of each column that no account retains any more."""
        self._ended = ended
        self._now_s = 0
        self._accounts: dict[str, _Account] = {}
        self._num_accounts: Counter[Hashable] = Counter()  # by column
        # What ends at a second, tails behind heads; and the seconds, least first.
        self._ending: dict[int, dict[tuple[str, str, Hashable], None]] = {}
        self._seconds: list[int] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._num_accounts

    def __len__(self) -> int:
        """Return how many columns are retained."""
        return len(self._num_accounts)

    def advance(self, now_s: float) -> None:
        """Let end what was retained until now; an earlier instant than before changes nothing."""
        self._now_s = max(self._now_s, floor(now_s))
        while self._seconds and self._seconds[0] <= self._now_s:
            for account, session, key in self._ending.pop(heappop(self._seconds)):
                self._drop(account, session, key)

    def hold(
        self,
        account: str,
        session: str,
        columns: Sequence[tuple[Hashable, float]],
        budget: RetentionBudget,
    ) -> int:
        """Retain columns, each until its instant, from the first one on as far as the account's
        budget goes; return how many. What the session retains for longer stays so.
        """
        mine = self._accounts.setdefault(account, _Account())
        num_held = 0
        for key, until_s in self._within(mine, columns, budget):
            self._hold_one(account, session, key, until_s)
            num_held += 1
        if not mine.until_s:
            del self._accounts[account]
        return num_held

    def num_within(
        self, account: str, columns: Sequence[tuple[Hashable, float]], budget: RetentionBudget
    ) -> int:
        """Return how many of these columns `hold` would retain."""
        mine = self._accounts.get(account, _Account())
        return sum(1 for _ in self._within(mine, columns, budget))

    def _within(
        self, mine: _Account, columns: Iterable[tuple[Hashable, float]], budget: RetentionBudget
    ) -> Iterator[tuple[Hashable, int]]:
        """Yield leading columns as far as the budget goes; each is retained by then, or none is."""
        num_left = budget.num_columns - len(mine.until_s)
        left_s = budget.column_s - mine.column_s(self._now_s)
        for key, until in columns:
            sessions, until_s = mine.until_s.get(key), ceil(until)
            known_s = self._now_s if sessions is None else max(sessions.values())
            more_s = max(0, until_s - known_s)
            if until_s <= self._now_s or (sessions is None and not num_left) or more_s > left_s:
                return
            num_left -= sessions is None
            left_s -= more_s
            yield key, until_s

    def _hold_one(self, account: str, session: str, key: Hashable, until_s: int) -> None:
        mine = self._accounts[account]
        sessions = mine.until_s.get(key)
        if sessions is None:
            sessions = mine.until_s[key] = {}
            mine.sum_until_s += self._now_s
            before_s = self._now_s
            self._num_accounts[key] += 1
        else:
            before_s = max(sessions.values())
        if session not in sessions and len(sessions) >= MAX_SESSIONS:
            session = UNNAMED
        known_s = sessions.get(session, self._now_s)
        if until_s <= known_s:
            return
        if session in sessions:
            self._forget_end(account, session, key, known_s)
        sessions[session] = until_s
        mine.columns_of[session][key] = None
        mine.sum_until_s += max(0, until_s - before_s)
        if until_s not in self._ending:
            self._ending[until_s] = {}
            heappush(self._seconds, until_s)
        self._ending[until_s][account, session, key] = None

    def _forget_end(self, account: str, session: str, key: Hashable, until_s: int) -> None:
        """The second stays in its place: once it is over, nothing ends."""
        self._ending[until_s].pop((account, session, key), None)

    def release(self, account: str, session: str) -> int:
        """Retain nothing for a session any more; return how many columns it retained."""
        mine = self._accounts.get(account)
        if mine is None or session == UNNAMED or session not in mine.columns_of:
            return 0
        return self._end_session(account, session)

    def keys_of(self, account: str, session: str) -> Collection[Hashable]:
        """Return the columns that a session retains, as far as it can release them."""
        mine = self._accounts.get(account)
        if mine is None or session == UNNAMED:
            return ()
        return mine.columns_of.get(session, {}).keys()

    def _end_session(self, account: str, session: str) -> int:
        mine = self._accounts[account]
        keys = list(mine.columns_of[session])
        for key in keys:
            self._forget_end(account, session, key, mine.until_s[key][session])
            self._drop(account, session, key)
        return len(keys)

    def fit(self, account: str, budget: RetentionBudget) -> None:
        """Retain nothing more for an account's sessions, the one first that has been here longest,
        until what is left is within a budget.
        """
        while mine := self._accounts.get(account):
            used = self.used(account)
            if used.num_columns <= budget.num_columns and used.column_s <= budget.column_s:
                return
            self._end_session(account, next(iter(mine.columns_of)))

    def clear(self) -> None:
        """Retain nothing any more: whatever the columns held is void."""
        keys = list(self._num_accounts)
        self._accounts.clear()
        self._num_accounts.clear()
        self._ending.clear()
        self._seconds.clear()
        for key in keys:
            self._ended(key)

    def _drop(self, account: str, session: str, key: Hashable) -> None:
        mine = self._accounts[account]
        sessions = mine.until_s[key]
        before_s = max(sessions.values())
        del sessions[session], mine.columns_of[session][key]
        if not mine.columns_of[session]:
            del mine.columns_of[session]
        if sessions:
            mine.sum_until_s += max(sessions.values()) - before_s
            return
        del mine.until_s[key]
        mine.sum_until_s -= before_s
        if not mine.until_s:
            del self._accounts[account]
        self._num_accounts[key] -= 1
        if not self._num_accounts[key]:
            del self._num_accounts[key]
            self._ended(key)

    def check_integrity(self) -> None:
        """Assert that sums, sessions and ends are those of what is retained."""
        num_accounts: Counter[Hashable] = Counter()
        ending: defaultdict[int, set[tuple[str, str, Hashable]]] = defaultdict(set)
        for name, mine in self._accounts.items():
            assert mine.until_s, "an account retains nothing"
            num_accounts.update(mine.until_s.keys())
            assert mine.sum_until_s == sum(max(one.values()) for one in mine.until_s.values())
            by_session: defaultdict[str, set[Hashable]] = defaultdict(set)
            for key, sessions in mine.until_s.items():
                assert 0 < len(sessions) <= MAX_SESSIONS + 1
                for session, until_s in sessions.items():
                    assert until_s > self._now_s, "what is over is retained"
                    by_session[session].add(key)
                    ending[until_s].add((name, session, key))
            assert {one: set(keys) for one, keys in mine.columns_of.items()} == by_session
        assert num_accounts == self._num_accounts
        assert {second: set(ends) for second, ends in self._ending.items() if ends} == ending
        assert sorted(self._seconds) == sorted(self._ending), "a second is lost, or there twice"

    @property
    def sessions(self) -> Iterator[tuple[str, str]]:
        """Yield the accounts and names of the sessions that retain columns."""
        for account, mine in self._accounts.items():
            for session in mine.columns_of:
                yield account, session

    def largest(self, limit: int) -> list[RetainingSession]:
        """Return the sessions that retain most columns, most first."""
        sessions = (
            RetainingSession(account=account, session=session, num_columns=len(keys))
            for account, mine in self._accounts.items()
            for session, keys in mine.columns_of.items()
        )
        return nlargest(limit, sessions, key=lambda one: one.num_columns)

    def columns(self, account: str, session: str) -> Iterator[tuple[Hashable, int]]:
        """Yield the columns that a session retains, each with its instant."""
        mine = self._accounts.get(account, _Account())
        for key in mine.columns_of.get(session, ()):
            yield key, mine.until_s[key][session]

    def used(self, account: str) -> RetentionBudget:
        """Return what of an account's budget is used now."""
        mine = self._accounts.get(account, _Account())
        num_columns, column_s = len(mine.until_s), mine.column_s(self._now_s)
        return RetentionBudget(num_columns=num_columns, column_s=column_s)
