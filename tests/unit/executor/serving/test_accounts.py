"""What one side only has is let go of, and nothing that is on its way in, out or to its end."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import pytest
from prometheus_client import REGISTRY

from services.executor.serving.accounts import Accounts
from services.executor.types import HeldRequests


@dataclass
class BothSides:
    """Sessions and an engine as three sets; `meanwhile` happens while the engine answers."""

    sessions: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    computed: set[str] = field(default_factory=set)
    meanwhile: Callable[[], None] = lambda: None

    def add(self, engine_id: str) -> None:
        for side in (self.sessions, self.answered, self.computed):
            side.add(engine_id)

    def end(self, engine_id: str) -> None:
        for side in (self.sessions, self.answered, self.computed):
            side.discard(engine_id)


@dataclass
class FakeSessions:
    both: BothSides

    def held(self) -> frozenset[str]:
        return frozenset(self.both.sessions)

    def lose(self, engine_ids: Collection[str]) -> None:
        self.both.sessions.difference_update(engine_ids)


@dataclass
class FakeEngine:
    both: BothSides

    async def held(self) -> HeldRequests:
        computed = frozenset(self.both.computed)
        self.both.meanwhile()
        return HeldRequests(answered=frozenset(self.both.answered), computed=computed)

    def abort(self, engine_ids: Sequence[str]) -> None:
        self.both.answered.difference_update(engine_ids)
        self.both.computed.difference_update(engine_ids)


def accounts_of(both: BothSides) -> Accounts:
    return Accounts(FakeSessions(both), FakeEngine(both))


def num_let_go(side: str) -> float:
    name = "evenflow_executor_orphaned_requests_total"
    return REGISTRY.get_sample_value(name, {"side": side}) or 0.0


async def test_a_request_that_the_engine_has_lost_is_ended_at_the_second_look() -> None:
    both = BothSides()
    both.add("kept")
    both.add("lost")
    both.answered.discard("lost")  # and the engine computes it for no reader
    accounts, before = accounts_of(both), num_let_go("sessions")

    await accounts.look()
    assert both.sessions == {"kept", "lost"}
    await accounts.look()

    assert both.sessions == both.answered == both.computed == {"kept"}
    assert num_let_go("sessions") == before + 1


async def test_a_request_that_the_scheduler_does_not_have_is_ended_for_its_reader() -> None:
    both = BothSides()
    both.add("lost")
    both.computed.discard("lost")
    accounts = accounts_of(both)

    await accounts.look()
    await accounts.look()

    assert both == BothSides(meanwhile=both.meanwhile)


@pytest.mark.logs("orphan_let_go")
async def test_a_request_that_no_session_has_is_aborted_at_the_second_look() -> None:
    for stray in ({"answered": {"r"}, "computed": {"r"}}, {"answered": {"r"}}, {"computed": {"r"}}):
        both, before = BothSides(**stray), num_let_go("engine")
        accounts = accounts_of(both)

        await accounts.look()
        assert both.answered or both.computed
        await accounts.look()

        assert not both.answered
        assert not both.computed
        assert num_let_go("engine") == before + 1


async def test_requests_that_come_and_go_while_the_engine_answers_are_left_alone() -> None:
    both = BothSides()
    accounts = accounts_of(both)

    def come_and_go(number: int) -> None:
        both.end(f"r{number - 1}")
        both.add(f"r{number}")

    for number in range(4):
        both.meanwhile = lambda number=number: come_and_go(number)  # type: ignore[misc]
        await accounts.look()
        assert both.sessions == both.answered == both.computed == {f"r{number}"}


async def test_an_orphan_of_looks_that_do_not_follow_each_other_is_left_alone() -> None:
    both = BothSides()
    both.add("r")
    accounts = accounts_of(both)

    for _ in range(3):
        both.answered.discard("r")
        await accounts.look()
        both.answered.add("r")
        await accounts.look()

    assert both.sessions == {"r"}
