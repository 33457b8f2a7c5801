"""Records of requests."""

from typing import Any

from services.control.requests.request_record import RequestRecord
from services.pacing.request_buffer import RequestBuffer
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel


def make_record(
    request_id: str, *, arrival_s: float = 0.0, level: ServiceLevel = NO_SERVICE_LEVEL
) -> RequestRecord[Any]:
    """Return the record of a request that has just arrived."""
    return RequestRecord(request_id=request_id, buffer=RequestBuffer(level), arrival_s=arrival_s)
