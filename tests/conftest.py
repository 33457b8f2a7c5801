"""What holds for all suites."""

import signal
import threading
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from tests.fuzz import load_profile

load_profile()

# A shell's background jobs, and all that they start, ignore Ctrl-C: processes of tests shall not.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _said_what_it_must(request: pytest.FixtureRequest) -> Iterator[None]:
    """Assert that the events were logged that a test's mark `logs` names."""
    mark = request.node.get_closest_marker("logs")
    if mark is None:
        yield
        return
    with capture_logs() as lines:
        yield
    assert set(mark.args) <= {line["event"] for line in lines}
