"""The lane: order, conservation, cancelling."""

from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.device.copies import CopyJob, Lane
from tests.fuzz import examples


def make_lane(**overrides) -> Lane:
    return Lane(**({"bytes_per_s": 1.0, "chunk_bytes": 4} | overrides))


def test_jobs_go_by_priority_and_equals_in_order() -> None:
    lane = make_lane()
    jobs = [CopyJob(num_bytes=2, priority=(p,)) for p in (1, 0, 1, 0)]
    for job in jobs:
        lane.submit(job, 0.0)

    lane.advance(100.0)

    assert [job.done_s for job in jobs] == [6.0, 2.0, 8.0, 4.0]


def test_a_chunk_under_way_at_the_end_of_an_advance_goes_on() -> None:
    lane = make_lane()
    job = CopyJob(num_bytes=10)
    lane.submit(job, 0.0)

    lane.advance(5.0)
    assert (job.num_left_bytes, lane.counts.busy_s) == (6, 4.0)

    lane.advance(10.0)
    assert job.done_s == 10.0


def test_a_more_urgent_job_waits_for_the_chunk_under_way_only() -> None:
    lane = make_lane()
    job, urgent = CopyJob(num_bytes=12, priority=(1,)), CopyJob(num_bytes=2, priority=(0,))
    lane.submit(job, 0.0)
    lane.advance(5.0)  # in the second chunk, which ends at 8
    lane.submit(urgent, 5.0)
    lane.advance(100.0)

    assert (urgent.done_s, job.done_s) == (10.0, 14.0)


def test_a_chunk_that_would_begin_now_lets_a_more_urgent_job_go_first() -> None:
    lane = make_lane()
    job, urgent = CopyJob(num_bytes=12, priority=(1,)), CopyJob(num_bytes=2, priority=(0,))
    lane.submit(job, 0.0)
    lane.advance(4.0)
    lane.submit(urgent, 4.0)
    lane.advance(100.0)

    assert (urgent.done_s, job.done_s) == (6.0, 14.0)


def test_another_rate_is_that_of_the_next_chunk() -> None:
    lane = make_lane(copy_overhead_s=1.0)
    job = CopyJob(num_bytes=12)
    lane.submit(job, 0.0)
    lane.advance(6.0)  # the second chunk runs from 5 to 10
    lane.set_rate(2.0)
    lane.advance(100.0)

    assert job.done_s == 10.0 + 1.0 + 4 / 2.0
    assert lane.counts.num_copies == 3


def test_an_idle_lane_starts_when_the_job_comes() -> None:
    lane = make_lane()
    lane.advance(7.0)
    job = CopyJob(num_bytes=3)
    lane.submit(job, 7.0)
    lane.advance(20.0)

    assert job.done_s == 10.0


def test_what_is_cancelled_and_has_not_begun_is_not_carried() -> None:
    lane = make_lane()
    job, other = CopyJob(num_bytes=10), CopyJob(num_bytes=4)
    lane.submit(job, 0.0)
    lane.submit(other, 0.0)
    lane.advance(1.0)
    job.cancelled = True
    lane.advance(100.0)

    assert job.done_s is None
    assert other.done_s == 8.0  # behind the chunk of 4 that had begun
    assert (lane.counts.carried_bytes, lane.counts.cancelled_bytes) == (8, 6)
    lane.check_integrity()


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["submit", "advance", "cancel"]), st.integers(0, 20)), max_size=40
)


@settings(max_examples=examples(100))
@given(ACTIONS)
def test_no_byte_is_lost_or_made(actions) -> None:
    lane, jobs, now_s = make_lane(copy_overhead_s=0.25), [], 0.0
    for action, number in actions:
        if action == "submit":
            jobs.append(CopyJob(num_bytes=number, priority=(number % 3,)))
            lane.submit(jobs[-1], now_s)
        elif action == "advance":
            now_s += number
            lane.advance(now_s)
        elif jobs and jobs[number % len(jobs)].done_s is None:
            jobs[number % len(jobs)].cancelled = True
        lane.check_integrity()
    lane.advance(now_s + 10_000.0)

    assert lane.num_queued_bytes == 0
    assert all((job.done_s is None) == (job.num_left_bytes > 0) for job in jobs)
    assert all(job.done_s is not None or job.cancelled for job in jobs)
    assert lane.counts.busy_s >= lane.counts.carried_bytes
