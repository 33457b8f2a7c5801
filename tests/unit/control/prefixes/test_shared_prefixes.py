"""What requests have in common, as the run policy is told: against sets of blocks."""

from hypothesis import given
from hypothesis import strategies as st

from services.control.prefixes.shared_prefixes import Stretch, shared_prefixes

SOURCES = "abc"


@st.composite
def request(draw: st.DrawFn) -> list[Stretch]:
    """Draw what a request begins with: each source begins where the one before it always ends."""
    stretches, begin = [], 0
    for source in draw(st.sampled_from(["", "a", "ab", "abc"])):
        # A source is as long for whoever has one behind it.
        whole = begin + 4
        end = draw(st.integers(begin + 1, whole))
        stretches.append(Stretch(source, end))
        if end < whole:
            break
        begin = whole
    return stretches


def blocks(stretches: list[Stretch]) -> set[tuple[str, int]]:
    """Return the blocks of one layer group that a request begins with."""
    begin, found = 0, set()
    for source, end in stretches:
        found |= {(str(source), position) for position in range(begin, end)}
        begin = end
    return found


@given(st.lists(request(), max_size=6), st.data())
def test_any_batch_counts_what_it_shares_once(requests: list[list[Stretch]], data: st.DataObject):
    shared = shared_prefixes(requests)
    batch = data.draw(st.sets(st.sampled_from(range(len(requests))))) if requests else set()

    num_whole = sum(len(blocks(requests[number])) for number in batch)
    parts = [part for number in batch for part in shared.of[number]]
    num_twice = sum(shared.rows[part] * (parts.count(part) - 1) for part in set(parts))

    assert num_whole - num_twice == len(set().union(*(blocks(requests[n]) for n in batch)))


def test_requests_that_begin_differently_share_nothing() -> None:
    shared = shared_prefixes([[Stretch("a", 4)], [Stretch("b", 4)], []])

    assert shared.rows == ()
    assert shared.of == ((), (), ())


def test_a_part_has_the_rows_between_where_requests_part() -> None:
    longer = [Stretch("trunk", 8), Stretch("one", 20)]
    shared = shared_prefixes(
        [longer, [Stretch("trunk", 8), Stretch("one", 12)], [Stretch("trunk", 5)]]
    )

    assert sorted(shared.rows) == [3, 4, 5]
    assert [sum(shared.rows[part] for part in parts) for parts in shared.of] == [12, 12, 5]
