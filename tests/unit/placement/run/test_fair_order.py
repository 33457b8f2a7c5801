"""In which order requests come in and give way where fairness ids have shares."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.run.evenflow import decide
from services.placement.run.newcomers import Claim, in_line, in_shares
from services.placement.run.types import RunPhase, RunRequest, RunSnapshot
from tests.fuzz import examples
from tests.unit.placement.run.snapshots import ask, make_snapshot, parked, runs, snapshots

AHEAD_S = 100.0


def names(line: list[RunRequest]) -> str:
    return " ".join(request.request_id for request in line)


def of(name: str, attained: float, *, age_s: float = 10.0, tokens: int = 10) -> RunRequest:
    """Return a newcomer of the id that its name begins with."""
    return ask(name, tokens, age_s=age_s, fairness_id=name[0], attained=attained)


def test_the_id_that_has_attained_least_comes_first_and_its_own_by_their_due_times() -> None:
    queue = [of("a1", 500.0, age_s=9.0), of("b2", 50.0, age_s=2.0), of("b1", 50.0, age_s=3.0)]

    assert names(in_line(queue)) == "a1 b1 b2"
    assert names(in_line(queue, ahead_s=1.0)) == "b1 b2 a1"


def test_what_comes_in_counts_as_attained_so_that_ids_take_turns() -> None:
    queue = [of(f"a{n}", 0.0, age_s=9.0 - n) for n in range(5)]
    queue += [of(f"b{n}", 0.0, age_s=1.0, tokens=20) for n in range(2)]

    assert names(in_line(queue, ahead_s=AHEAD_S)) == "a0 b0 a1 a2 b1 a3 a4"


def test_one_that_was_passed_over_comes_first_and_one_of_it_alone() -> None:
    queue = [of("a1", 0.0), of("b1", -400.0), of("b2", -400.0)]

    assert names(in_line(queue, ahead_s=AHEAD_S)) == "b1 a1 b2"


@given(
    claims=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), min_size=1, max_size=30
    ),
    attained=st.lists(st.floats(-10.0, 5_000.0), min_size=4, max_size=4),
)
def test_at_each_place_stands_the_id_with_least_and_nothing_is_lost(
    claims: list[tuple[str, int]], attained: list[float]
) -> None:
    had = dict(zip("abcd", attained, strict=True))
    line = [(number, Claim(name, had[name], size)) for number, (name, size) in enumerate(claims)]

    taken = in_shares(line, lambda one: one[1], ahead_s=AHEAD_S)

    assert sorted(taken) == line
    left = list(line)
    for one in taken:
        least = min(had[other.fairness_id] for _, other in left)
        assert had[one[1].fairness_id] == least
        assert one == next(other for other in left if other[1].fairness_id == one[1].fairness_id)
        left.remove(one)
        had[one[1].fairness_id] = max(least, 0.0) + one[1].num_tokens * AHEAD_S


@settings(max_examples=examples(100))
@given(snapshot=snapshots(), attained=st.floats(-500.0, 1e6))
def test_a_lone_id_is_served_as_if_there_were_no_shares(
    snapshot: RunSnapshot, attained: float
) -> None:
    lone = [replace(r, fairness_id="a", attained=attained) for r in snapshot.requests]

    decision = decide(replace(snapshot, requests=tuple(lone), ahead_s=AHEAD_S))

    assert decision == decide(snapshot)


# -- who gives way ---------------------------------------------------------------------------------

# The pool of `make_engine` holds 1,600 tokens. What is parked and older than the others leaves them
# no room by age: they stand by.


def standing_by(*requests: RunRequest, num_first: int) -> RunSnapshot:
    """Return an engine to which a request that is away cannot come back."""
    first = parked("first", num_first, age_s=90.0, fairness_id="first")
    return make_snapshot(first, *requests, ahead_s=AHEAD_S)


def test_of_an_outgrown_pool_the_id_that_has_attained_most_gives_way() -> None:
    def parks(**attained: float) -> set[str]:
        batch = [
            runs(name, 550, age_s=age_s, fairness_id=name, attained=attained.get(name, 0.0))
            for name, age_s in (("a", 30.0), ("b", 20.0), ("c", 10.0))
        ]
        unsaved = [replace(request, num_host_tokens=0) for request in batch]
        return set(decide(standing_by(*unsaved, num_first=1_200)).park)

    assert parks() == {"c"}
    assert parks(a=5.0) == {"a"}
    assert parks(a=5.0, b=9.0, c=2.0) == {"b"}


def test_less_urgent_ones_give_way_by_what_their_ids_have_attained() -> None:
    urgent = ask("u", 900, priority=0)
    low = [
        runs(name, 400, age_s=age_s, priority=1, fairness_id=name, attained=attained)
        for name, age_s, attained in (("old", 30.0, 7.0), ("new", 20.0, 3.0))
    ]
    without = [replace(request, attained=0.0) for request in low]

    assert decide(make_snapshot(*without, urgent)).park == {"new"}
    assert decide(make_snapshot(*low, urgent, ahead_s=AHEAD_S)).park == {"old"}


def test_of_those_that_come_back_the_id_that_has_attained_least_is_first() -> None:
    def comes(**attained: float) -> set[str]:
        away = [
            parked(name, 500, age_s=age_s, fairness_id=name, attained=attained.get(name, 0.0))
            for name, age_s in (("old", 30.0), ("new", 20.0))
        ]
        unsaved = runs("r", 700, age_s=50.0, num_host_tokens=0)
        return set(decide(standing_by(unsaved, *away, num_first=1_200)).run) - {"r"}

    assert comes() == {"old"}
    assert comes(old=7.0, new=3.0) == {"new"}


def test_priorities_come_before_shares() -> None:
    first = ask("urgent", 900, fairness_id="a", attained=1e9, priority=0)
    other = ask("other", 900, fairness_id="b", attained=0.0, priority=1)

    decision = decide(make_snapshot(first, other, ahead_s=AHEAD_S))

    assert decision.run == ("urgent",)
    assert first.phase is RunPhase.NEW
