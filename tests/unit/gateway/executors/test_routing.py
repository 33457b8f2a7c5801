"""Which executor takes a request."""

import pytest

from services.gateway.errors import UnknownModelError
from services.gateway.executors.routing import Candidate, choose_executor
from services.kit.errors import UnavailableError


def make_candidate(address: str, num_inflight: int = 0, model: str = "m") -> Candidate:
    return Candidate(address=address, model=model, num_inflight=num_inflight, max_model_len=1)


@pytest.mark.parametrize(
    ("loads", "excluded", "chosen"),
    [
        pytest.param([2, 1, 3], [], "e1", id="the-least-loaded"),
        pytest.param([1, 0, 2], ["e1"], "e0", id="not-an-excluded-one"),
    ],
)
def test_load_decides(loads, excluded, chosen) -> None:
    candidates = [make_candidate(f"e{k}", load) for k, load in enumerate(loads)]

    assert choose_executor(candidates, "m", excluded=excluded).address == chosen


def test_equals_come_by_turns() -> None:
    candidates = [make_candidate(f"e{k}", load) for k, load in enumerate([1, 2, 1, 1])]
    chosen = [choose_executor(candidates, "m", turn=turn).address for turn in range(4)]

    assert chosen == ["e0", "e2", "e3", "e0"]


def test_only_executors_of_the_model_count() -> None:
    candidates = [make_candidate("idle", 0, "other"), make_candidate("busy", 9)]

    assert choose_executor(candidates, "m").address == "busy"


def test_a_model_that_no_connected_executor_serves_is_unknown() -> None:
    with pytest.raises(UnknownModelError):
        choose_executor([make_candidate("e", model="other")], "m")


def test_without_any_executor_no_model_is_unknown() -> None:
    with pytest.raises(UnavailableError):
        choose_executor([], "m")


def test_when_all_that_serve_it_are_excluded_it_is_unavailable() -> None:
    candidates = [make_candidate("e"), make_candidate("f", model="other")]

    with pytest.raises(UnavailableError):
        choose_executor(candidates, "m", excluded=["e"])
