"""Live requests share what they begin with: tokens identical to stock vLLM's, wherever it is.

Stock vLLM answers without any prefix caching, from a pool that holds everything. Copies take their
time, and what is freed is NaN. The tests run on the engines of `test_layerwise_exact.py`, which
imports them.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from lab.engine.agents import LARGE, SALTED, TWINS, agents
from lab.engine.step_runner import Arrival, Hook, Outcome, StepRunner, first_difference
from lab.engine.workloads import churn, random_way, together, with_aborts
from services.executor.blocks.holder import Holder
from services.executor.blocks.residency import RequestKV, Trunk
from services.executor.blocks.sharing.splits import Splits
from services.executor.blocks.sharing.trunks import Trunks
from services.executor.blocks.transfers.write_through import WriteThrough
from services.executor.copies.load_tables import LoadTables
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import ResumeWay
from tests.exact import faults
from tests.exact.cached_prefixes import LAYERS_ONLY, TWO_ENGINES, assert_same_tokens, copied_at_once
from tests.exact.evidence import assert_pool_is_whole
from tests.exact.reference import reference

MIN_SHARED_BLOCKS = 1_000  # of one layer, that a request has only because another one has
MIN_TRUNK_MOVES = 25  # of each layer group, that trunks left the pool, and came back
MIN_SPLITS = {"all": 10}  # by where the holder was, see `Sharing.watching`
MIN_EARLY = 20  # trunks over steps, used before they were on the host
MAX_ROUNDS = 40


@pytest.fixture(scope="module")
def expected_agents() -> Outcome:
    return reference("float32")["agents"]


class Sharing:
    """Watches trunks: call it before each step."""

    def __init__(self, runner: StepRunner) -> None:
        self.num_blocks = 0  # of one layer, that requests joined
        self.num_left = self.num_back = 0  # layer groups of trunks
        self.num_early = 0  # trunks that several used before they were on the host, over steps
        self.most_tokens = 0  # of a request that shares
        self.num_users: Counter[int] = Counter()  # of trunks, over steps
        self.names: set[str] = set()  # of requests that have shared
        self._first_users: dict[Trunk, RequestKV] = {}
        self._offloaded: dict[Trunk, frozenset[int]] = {}
        self._joined: set[tuple[str, str]] = set()
        self._outlived: set[str] = set()
        self._runner = runner
        self.num_splits: Counter[str] = Counter()  # by where the holder was, if it is `watching`

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count splits of holders with layers on the host, and of those that are on their way."""
        splits = self._runner.scheduler.block_owner.trunks.splits
        split = splits.split

        def counted(holder: Holder, end: int) -> Trunk:
            self.num_splits["all"] += 1
            self.num_splits["offloaded"] += bool(holder.offloaded)
            loading = (group.restore and group.restore.under_way for group in holder.groups)
            self.num_splits["loading"] += any(loading)
            return split(holder, end)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(splits, "split", counted)
            yield

    def __call__(self, scheduler: Any, step: int) -> None:
        trunks = scheduler.block_owner.trunks.all
        for trunk in trunks:
            now, before = frozenset(trunk.offloaded), self._offloaded.get(trunk, frozenset())
            self.num_left += len(now - before)
            self.num_back += len(before - now)
            self.num_users[len(trunk.users)] += 1
            self.num_early += len(trunk.users) > 1 and not trunk.mirrored
            for user in list(trunk.users)[1:]:
                if (user.request_id, trunk.name) not in self._joined:
                    self._joined.add((user.request_id, trunk.name))
                    length = trunk.end - trunk.first
                    self.num_blocks += length * self._runner.case.model.num_layers
            self._first_users.setdefault(trunk, next(iter(trunk.users)))
            self.names |= {user.request_id for user in trunk.users}
            self.most_tokens = max(self.most_tokens, trunk.num_tokens)
        self._offloaded = {trunk: frozenset(trunk.offloaded) for trunk in trunks}
        gone = [t for t in trunks if self._first_users[t] not in t.users]
        self._outlived.update(trunk.name for trunk in gone)

    @property
    def num_outlived(self) -> int:
        """Return how many trunks were used when their first user had left."""
        return len(self._outlived)


def churn_of_trunks(seed: int, share: float) -> Hook:
    """Before each step, give a share of the trunks a new random placement."""
    rng = random.Random(seed)

    def hook(scheduler: Any, step: int) -> None:
        num_groups = scheduler.block_owner.geometry.num_groups
        for trunk in scheduler.block_owner.trunks.all:
            if rng.random() < share:
                density = rng.random()
                groups = frozenset(g for g in range(num_groups) if rng.random() < density)
                trunk.floor = LayerPlacement(offloaded=groups, num_staging=rng.choice((1, 2)))

    return hook


def share_in_all_ways(
    runner: StepRunner,
    expected: Outcome,
    monkeypatch: pytest.MonkeyPatch,
    *,
    min_splits: Mapping[str, int] = MIN_SPLITS,
    min_outlived: int = 0,
    min_early: int = MIN_EARLY,
) -> None:
    """Assert that agents share prefixes while trunks and own parts move, and come back anyhow.

    In every second round all is copied late. `min_outlived`: trunks, by their first user;
    `min_early`: over steps, used before they were on the host.
    """
    resumes = runner.scheduler.control.resumes
    write_through = runner.scheduler.transfers.write_through
    sharing = Sharing(runner)
    num_moves = MIN_TRUNK_MOVES * runner.scheduler.block_owner.geometry.num_groups
    is_moved = False
    for seed in range(MAX_ROUNDS):
        monkeypatch.setattr(resumes, "choose_way", random_way(seed))
        monkeypatch.setattr(write_through, "_budget", lambda _, most=(1_000, 1)[seed % 2]: most)
        moves = together(churn(seed, share=0.1), churn_of_trunks(seed, share=0.3), sharing)
        if is_moved and seed % 2:
            # What has layers on the host shares nothing early: of two stages' requests most have.
            moves = sharing

        with sharing.watching():
            outcome = runner.run(agents(), hook=moves)

        assert_same_tokens(runner, expected, outcome)
        splits = {where: sharing.num_splits[where] for where in min_splits}
        is_moved = (
            sharing.num_blocks >= MIN_SHARED_BLOCKS
            and min(sharing.num_left, sharing.num_back) >= num_moves
            and all(splits[where] >= least for where, least in min_splits.items())
            and sharing.num_outlived >= min_outlived
            and sharing.most_tokens >= len(LARGE) // 32 * 32
        )
        if is_moved and sharing.num_early >= min_early:
            break
    assert sharing.num_blocks >= MIN_SHARED_BLOCKS
    assert min(sharing.num_left, sharing.num_back) >= num_moves
    assert all(splits[where] >= least for where, least in min_splits.items()), splits
    assert sharing.num_outlived >= min_outlived
    assert sharing.num_early >= min_early
    assert sharing.most_tokens >= len(LARGE) // 32 * 32
    assert set(TWINS) <= sharing.names
    assert SALTED not in sharing.names


@TWO_ENGINES
def test_agents_share_prefixes_that_move_and_are_larger_than_the_pool(
    runner: StepRunner, expected_agents: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_in_all_ways(runner, expected_agents, monkeypatch)


@LAYERS_ONLY
def test_aborts_of_first_and_last_users_leave_the_others_exact(
    runner: StepRunner, expected_agents: Outcome
) -> None:
    sharing, workload = Sharing(runner), with_aborts(agents(), seed=3, share=0.5)

    outcome = runner.run(workload, hook=together(churn_of_trunks(3, share=0.2), sharing))

    aborted = {arrival.request_id for arrival in workload if arrival.abort_at is not None}
    for request_id in aborted:
        got = outcome.tokens.pop(request_id, [])
        assert got == expected_agents.tokens[request_id][: len(got)]
    assert outcome.tokens.items() <= expected_agents.tokens.items()
    assert len(aborted & sharing.names) >= 5
    assert sharing.num_outlived >= 2
    assert_pool_is_whole(runner)


# -- negative controls ---------------------------------------------------------------------------


def some_agents() -> list[Arrival]:
    """Return those on one prefix, of which the others outlive the first, and join a trunk."""
    return [arrival for arrival in agents() if arrival.request_id.startswith("a0.")]


@pytest.fixture
def shared_at_once(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> Hook:
    resumes = runner.scheduler.control.resumes
    monkeypatch.setattr(resumes, "choose_way", lambda *_: ResumeWay.LOAD)
    return together(copied_at_once(runner, monkeypatch), moving_trunks())


def moving_trunks(period: int = 6) -> Hook:
    """Let all trunks leave the pool, and come back."""

    def hook(scheduler: Any, step: int) -> None:
        away = frozenset(range(scheduler.block_owner.geometry.num_groups))
        groups = away if step // period % 2 else frozenset[int]()
        for trunk in scheduler.block_owner.trunks.all:
            trunk.floor = LayerPlacement(offloaded=groups, num_staging=1)

    return hook


def without_last_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a trunk's edits miss one of its users."""
    shown = LoadTables._shown

    def shown_to_all_but_one(self: LoadTables, edits: Any) -> Any:
        users, self._users = self._users, {t: u[:-1] for t, u in self._users.items()}
        yield from list(shown(self, edits))
        self._users = users

    monkeypatch.setattr(LoadTables, "_shown", shown_to_all_but_one)


def ends_with_first_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free a trunk's blocks when its first user leaves."""
    leave = Trunks.leave

    def leave_too_early(self: Trunks, kv: RequestKV) -> Any:
        others = [t for t in kv.trunks if len(t.users) > 1 and next(iter(t.users)) is kv]
        for trunk in others:
            self._blocks.poison([b for group in trunk.groups for b in group.owned_blocks()])
        return leave(self, kv)

    monkeypatch.setattr(Trunks, "leave", leave_too_early)


def one_block_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show users of a trunk its last block but one in place of its last."""
    shown = RequestKV.shown_rows

    def wrongly(self: RequestKV) -> Any:
        rows = shown(self)
        if self.trunks:
            last = self.num_shared - 1
            rows = tuple([*row[:last], row[last - 1], *row[last + 1 :]] for row in rows)
        return rows

    monkeypatch.setattr(RequestKV, "shown_rows", wrongly)


def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load an offloaded trunk for its first user only."""
    of = LoadTables.of

    def of_first(self: LoadTables, names: list[str]) -> Any:
        scheduled = [
            name for name in names if name not in self._users or len(self._users[name]) < 2
        ]
        return of(self, scheduled)

    monkeypatch.setattr(LoadTables, "of", of_first)


def leaves_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trunks leave that nobody has copied."""
    split = Splits.split

    def as_if_copied(self: Splits, holder: Holder, end: int) -> Trunk:
        trunk = split(self, holder, end)
        trunk.mirrored = True
        for group in trunk.groups:
            group.num_saves_sent = group.num_host_blocks = end
        return trunk

    monkeypatch.setattr(Splits, "split", as_if_copied)
    monkeypatch.setattr(WriteThrough, "_mirror", lambda *_: None)


CONTROLS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an edit that one user does not get": without_last_user,
    "a trunk that ends with its first user": ends_with_first_user,
    "rows one block off": one_block_off,
    "an offloaded trunk that is not loaded": not_loaded,
    "a trunk that leaves before it is on the host": leaves_early,
}


@LAYERS_ONLY
@pytest.mark.parametrize("name", CONTROLS)
def test_a_broken_trunk_is_noticed(
    runner: StepRunner, shared_at_once: Hook, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sharing = Sharing(runner)
    with faults.spoiling(faults.FaultyEngine):  # the guard is not asked
        right = runner.run(some_agents(), hook=together(shared_at_once, sharing))
        assert sharing.num_users[2] > 0
        CONTROLS[name](monkeypatch)

        outcome = runner.run(some_agents(), hook=shared_at_once, check=False)

    assert first_difference(right, outcome)
