"""How late the scheduler hears what readers have."""

from services.pacing.types import ServiceLevel
from services.placement.blocks import BlockGeometry
from services.placement.types import RequestId
from simulator.engine.reader_reports import ReaderReports
from simulator.memory.requests import SimulatedRequest, live_request
from simulator.workload import ArrivingRequest


def dry_reader() -> SimulatedRequest:
    """Return a request that decodes slower than it is read: a token at 1.0, 1.1, 1.2, ... s."""
    request = live_request(
        ArrivingRequest(
            request_id=RequestId("a"),
            arrival_s=0.0,
            num_prompt_tokens=1,
            num_output_tokens=9,
            level=ServiceLevel(slo_tbt_s=0.05),
        ),
        BlockGeometry(num_groups=1, block_size=4),
    )
    request.num_computed_tokens = 1
    for number in range(4):
        assert request.step_ended(1.0 + number / 10)
        request.num_computed_tokens += 1
    return request


def test_without_reports_each_token_is_there_when_it_is_due() -> None:
    request = dry_reader()
    ReaderReports(0.0).take_in([request], 1.3)

    assert request.reader.num_deposited(1.3) == 0


def test_a_count_is_taken_for_what_it_was_when_it_was_made() -> None:
    # The call of 0 s is answered at 1.0 s, so the next is made then and answered at 1.3 s: its
    # count of 1.0 s has the first token only, and the others were due since.
    request, reports = dry_reader(), ReaderReports(0.05)
    reports.take_in([], 1.0)
    reports.take_in([request], 1.3)

    assert request.num_told == 1
    assert request.reader.num_deposited(1.3) == 0
