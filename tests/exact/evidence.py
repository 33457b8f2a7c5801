"""What a run must have gone through before its tokens say anything."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from lab.engine.step_runner import Arrival, Outcome, StepRunner, first_difference
from services.placement.run.resume import ResumeWay
from tests.exact.cases import num_groups

MIN_LAYER_LOADS = 1_000  # layers of requests loaded into staging
MIN_REUSED_EVICTIONS = 20  # blocks that an offload gave back and somebody took again
MIN_RANDOM_CHANGES = 200  # layer groups of requests that left the pool or came back

KEEPING = (ResumeWay.LOAD, ResumeWay.HOST_RESIDENT)  # what is on the host


class Returns:
    """Listens who leaves drained, and with how many tokens each comes back."""

    def __init__(self, runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
        self.num_back = self.num_recomputed_tokens = 0
        self._left: dict[str, int] = {}
        control = runner.scheduler.control
        self._preempt, self._admitted = control.preempt, control.admitted
        patch.setattr(control, "preempt", self._on_preempt)
        patch.setattr(control, "admitted", self._on_admitted)

    def _on_preempt(self, request: Any) -> None:
        self._left[request.request_id] = request.num_computed_tokens
        self._preempt(request)

    def _on_admitted(self, requests: Iterable[Any], num_scheduled: Mapping[str, int]) -> None:
        requests = list(requests)
        for request in requests:
            num_before = self._left.pop(request.request_id, None)
            if num_before is not None:
                num_there = request.num_computed_tokens - num_scheduled[request.request_id]
                self.num_back += 1
                self.num_recomputed_tokens += num_before - num_there
        self._admitted(requests, num_scheduled)


def assert_exact(
    runner: StepRunner,
    expected: Outcome,
    outcome: Outcome,
    workload: Sequence[Arrival],
    *,
    min_changes: int = 2,
) -> None:
    """Assert equal tokens, from a run that moved KV in both directions and left a whole pool.

    `expected` may hold more requests. Aborted ones end early, with what they got until then.
    """
    assert_tokens(expected, outcome, workload)
    assert_pressure(runner, outcome, min_changes=min_changes)
    assert_pool_is_whole(runner)


def assert_tokens(expected: Outcome, outcome: Outcome, workload: Sequence[Arrival]) -> None:
    """Assert equal tokens; `expected` may hold more requests, aborted ones end early."""
    differing = first_difference(expected, outcome)
    for arrival in workload:
        first = differing.get(arrival.request_id)
        if arrival.abort_at is not None and first is not None:
            assert first == len(outcome.tokens.get(arrival.request_id, []))
        else:
            assert first is None, f"token {first} of {arrival.request_id} differs"


def assert_pool_is_whole(runner: StepRunner) -> None:
    """Assert that no block of the pool and no slot of the host is anybody's."""
    owner = runner.scheduler.block_owner
    assert owner.pool.get_num_free_blocks() == owner.pool.num_gpu_blocks - 1
    assert owner.sides.num_owned == 0
    assert owner.host.num_used == 0


def assert_pressure(runner: StepRunner, outcome: Outcome, *, min_changes: int) -> None:
    """Assert that one run, by itself, loaded, moved and evicted enough."""
    assert num_layer_loads(runner, outcome) >= MIN_LAYER_LOADS
    assert outcome.num_offloads >= 1, "no layer group left the pool"
    assert outcome.num_restores >= 1, "no layer group came back"
    assert outcome.num_offloads + outcome.num_restores >= min_changes
    assert outcome.num_reused_evictions >= MIN_REUSED_EVICTIONS
    assert runner.scheduler.block_owner.geometry.num_groups == num_groups(runner.case)


def num_layer_loads(runner: StepRunner, outcome: Outcome) -> int:
    """Return the loads of layers of requests; the shards of one layer count once."""
    case = runner.case
    assert case.kv is not None
    num_group_loads = int(outcome.sums["num_loads"]) // case.tensor_parallel_size
    return num_group_loads * case.kv.layers_per_group
