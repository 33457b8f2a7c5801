"""The speed of a link from copies that a test makes up."""

import pytest

from services.control.measures.link_rate import LinkRate
from services.control.measures.step_timing import CopyTime


def copies(num_bytes: float, *, rate: float, overhead_s: float = 0.0, count: int = 1) -> CopyTime:
    busy_s = num_bytes / rate + count * overhead_s
    return CopyTime(num_bytes=int(num_bytes), busy_s=busy_s, num_copies=count)


def rate_of(link: LinkRate) -> float:
    found = link.link(chunk_bytes=1 << 20, num_queued_bytes=0)
    assert found is not None
    return found.bytes_per_s


def test_nothing_is_known_before_the_first_copy() -> None:
    assert LinkRate().link(chunk_bytes=1, num_queued_bytes=0) is None


def test_copies_of_two_sizes_tell_rate_from_overhead() -> None:
    rate = LinkRate()
    rate.calibrate(
        copies(4e4, rate=1e9, overhead_s=1e-4, count=4), copies(4e6, rate=1e9, overhead_s=1e-4)
    )

    link = rate.link(chunk_bytes=1 << 20, num_queued_bytes=7)

    assert link is not None
    assert link.bytes_per_s == pytest.approx(1e9)
    assert link.copy_overhead_s == pytest.approx(1e-4)
    assert (link.chunk_bytes, link.num_queued_bytes) == (1 << 20, 7)


def test_a_link_that_halves_is_known_to_a_tenth_after_eight_steps() -> None:
    rate = LinkRate()
    for _ in range(50):
        rate.add(copies(1e6, rate=1e9))
    for _ in range(8):
        rate.add(copies(1e6, rate=5e8))

    assert rate_of(rate) == pytest.approx(5e8, rel=0.1)


def test_the_peak_outlives_a_slow_spell() -> None:
    rate = LinkRate()
    rate.add(copies(1e6, rate=1e9))
    for _ in range(20):
        rate.add(copies(1e6, rate=1e8))

    link = rate.link(chunk_bytes=1, num_queued_bytes=0)

    assert link is not None
    assert link.peak_bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_steps_without_copies_change_nothing() -> None:
    rate = LinkRate()
    rate.add(copies(1e6, rate=1e9))
    for _ in range(100):
        rate.add(CopyTime(num_bytes=0, busy_s=0.0, num_copies=0))

    assert rate_of(rate) == pytest.approx(1e9)


def test_an_overhead_larger_than_the_busy_time_leaves_a_finite_rate() -> None:
    rate = LinkRate()
    rate.calibrate(copies(1e4, rate=1e6, overhead_s=1.0), copies(1e6, rate=1e9, overhead_s=1.1))
    rate.add(CopyTime(num_bytes=1000, busy_s=1e-3, num_copies=1_000))

    assert 0.0 < rate_of(rate) < float("inf")
