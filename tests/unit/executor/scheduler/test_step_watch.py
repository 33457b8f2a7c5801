"""What the controller learns from a step as it leaves the scheduler."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from services.control.requests.request_record import Stage
from services.control.types import ScheduledStep, Trigger
from services.executor.scheduler.step_watch import StepWatch
from services.executor.step_messages import (
    LoadTableUpdate,
    RestoreOrder,
    StepFeedback,
    StepTransfers,
)
from services.placement.step_time.batch import SEALING_STEPS
from tests.unit.records import make_record


def make_watch() -> StepWatch:
    records = {name: make_record(name) for name in ("a", "b", "new")}
    records["a"].stage = records["b"].stage = Stage.DECODES
    return StepWatch(records)


def run(watch: StepWatch, scheduled: dict[str, int], **options: Any) -> ScheduledStep:
    """Schedule a step: tokens by request; `new` ones are admitted in it, all had 100 tokens."""
    new, transfers = options.get("new", ()), options.get("transfers", StepTransfers(step=1))
    cached = [name for name in scheduled if name not in new]
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=n, num_computed_tokens=0) for n in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=cached,
            resumed_req_ids=set(options.get("resumed", ())),
            num_computed_tokens=[100] * len(cached),
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        kv_connector_metadata=transfers,
    )
    return watch.scheduled(output, 5.0)


def test_a_decode_step_reads_every_context_and_writes_one_token_each() -> None:
    watch = make_watch()
    run(watch, {"a": 1, "b": 1})

    step = run(watch, {"a": 1, "b": 1})

    assert (step.num_tokens, step.num_context_tokens, step.num_prefill_tokens) == (2, 202, 0)
    assert step.same_batch
    assert step.undisturbed


def test_prompt_tokens_are_those_of_requests_that_are_not_complete() -> None:
    watch = make_watch()
    step = run(watch, {"a": 1, "new": 50}, new=("new",))
    assert (step.num_prefill_tokens, step.num_context_tokens) == (50, 151)
    assert step.num_prefill_pairs == 50 * 51 // 2
    assert not step.same_batch

    second_chunk = run(watch, {"a": 1, "new": 20})
    assert second_chunk.num_prefill_tokens == 20
    assert second_chunk.num_prefill_pairs == 20 * 100 + 20 * 21 // 2

    watch._records["new"].stage = Stage.DECODES
    assert run(watch, {"a": 1, "new": 1}).num_prefill_tokens == 0


def test_a_resumed_request_computes_its_tokens_again() -> None:
    step = run(make_watch(), {"a": 70}, resumed=("a",))

    assert step.num_prefill_tokens == 70


def test_another_batch_or_another_placement_is_another_composition() -> None:
    watch = make_watch()
    run(watch, {"a": 1, "b": 1})
    assert not run(watch, {"a": 1}).same_batch
    assert run(watch, {"a": 1}).same_batch

    growing = StepTransfers(step=2, table_updates=[LoadTableUpdate("a", 0, False, 0, [range(1)])])
    moving = StepTransfers(step=3, table_updates=[LoadTableUpdate("a", 0, True, 0, [range(1)])])

    assert run(watch, {"a": 1}, transfers=growing).same_batch
    assert not run(watch, {"a": 1}, transfers=moving).same_batch
    assert not run(
        watch, {"a": 1}, transfers=StepTransfers(step=4, dropped_tables=[("a", 0)])
    ).same_batch


def test_restores_disturb_until_they_are_complete_or_cancelled() -> None:
    watch = make_watch()
    orders = [RestoreOrder(number, "a", 0, [0], [1], [1]) for number in (1, 2)]
    assert not run(watch, {"a": 1}, transfers=StepTransfers(step=1, restores=orders)).undisturbed

    watch.ended(StepFeedback(step=1, saved_step=1, num_ranks_done=Counter([1])))
    assert not run(watch, {"a": 1}).undisturbed

    ended = StepTransfers(step=3, cancelled_restores=[2])
    assert run(watch, {"a": 1}, transfers=ended).undisturbed


@pytest.mark.parametrize(
    ("num_missing", "noted"), [(SEALING_STEPS, [Trigger.MIRRORED]), (SEALING_STEPS + 1, [])]
)
def test_a_copy_has_caught_up_when_it_lacks_the_newest_blocks_only(
    num_missing: int, noted: list[Trigger]
) -> None:
    watch = make_watch()
    kv: Any = SimpleNamespace(mirrored=True, num_host_blocks=10 - num_missing, num_full_blocks=10)
    watch._records["a"].kv = kv
    running: list[Any] = [SimpleNamespace(request_id="a", num_computed_tokens=9, num_tokens=10)]
    step: Any = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set())
    )

    assert list(watch.progress(step, running)) == noted
    assert list(watch.progress(step, running)) == []  # once
