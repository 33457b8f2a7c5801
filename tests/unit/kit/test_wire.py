"""What one side writes is what the other reads, field by field, whatever it holds."""

import dataclasses
from collections.abc import Iterator
from enum import Enum
from typing import Any, get_type_hints

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.planner.v1 import planner_pb2 as pb
from services.kit.errors import InvalidRequestError
from services.kit.wire import _kind_and_rules, read, write
from services.placement.ranges import AtMost, Within
from services.placement.types import Plan, PlanStatus, PolicyParameters, Snapshot
from tests.fuzz import examples

MAX_EXACT = 2**53  # of an integer that a float bound can state
WIDEST = {"double": 1e300, "int32": 2**31 - 1, "int64": MAX_EXACT}


def values(cls: type, message: type[Message]) -> st.SearchStrategy[Any]:
    """Return a strategy of a dataclass' values, within the ranges that its types state."""
    hints = get_type_hints(cls, include_extras=True)
    wire = message.DESCRIPTOR.fields_by_name
    return st.builds(
        cls,
        **{
            field.name: field_values(field, hints[field.name], wire[field.name])
            for field in dataclasses.fields(cls)
        },
    )


def field_values(field: Any, hint: Any, wire: Any) -> st.SearchStrategy[Any]:
    kind, rules = _kind_and_rules(hint)
    one = single_values(kind, rules, wire)
    most = next((rule.length for rule in rules if isinstance(rule, AtMost)), 4)
    if wire.is_repeated:
        return st.lists(one, max_size=min(4, most)).map(tuple)
    return st.none() | one if field.default is None else one


def single_values(kind: Any, rules: Any, wire: Any) -> st.SearchStrategy[Any]:
    if dataclasses.is_dataclass(kind):
        return values(kind, wire.message_type._concrete_class)  # type: ignore[arg-type]
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.text("abc", min_size=1, max_size=8)
    within = next((rule for rule in rules if isinstance(rule, Within)), None)
    if kind is float:
        assert within is not None
        return st.floats(
            within.low, min(within.high, WIDEST["double"]), exclude_min=within.above_low
        )
    low, high = (within.low, within.high) if within else (-7, 7)
    widest = WIDEST["int64" if wire.cpp_type == wire.CPPTYPE_INT64 else "int32"]
    return st.integers(int(low), int(min(high, widest)))


def sent(message: Message) -> Any:
    return type(message).FromString(message.SerializeToString())


@settings(max_examples=examples(60))
@given(values(Snapshot, pb.Snapshot))
def test_a_snapshot_arrives_as_it_was(snapshot: Snapshot) -> None:
    assert read(Snapshot, sent(write(snapshot, pb.Snapshot)), "snapshot") == snapshot


@settings(max_examples=examples(60))
@given(values(Plan, pb.Plan))
def test_a_plan_arrives_as_it_was(plan: Plan) -> None:
    message = sent(write(plan, pb.Plan))

    assert read(Plan, message, "plan") == plan
    if plan.quality is not None:
        assert message.quality.gap_frac == plan.quality.gap_frac


def pairs(cls: Any, message: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a dataclass and its message, and those of their parts."""
    yield cls, message
    hints = get_type_hints(cls, include_extras=True)
    for field in message.fields:
        if field.message_type is not None:
            yield from pairs(_kind_and_rules(hints[field.name])[0], field.message_type)


@pytest.mark.parametrize(
    ("cls", "message"), [(Snapshot, pb.Snapshot.DESCRIPTOR), (Plan, pb.Plan.DESCRIPTOR)]
)
def test_no_field_is_on_one_side_only(cls: Any, message: Any) -> None:
    for kind, descriptor in pairs(cls, message):
        names = {field.name for field in dataclasses.fields(kind)}
        derived = {field.name for field in descriptor.fields} - names
        assert names <= {field.name for field in descriptor.fields}, kind
        assert all(isinstance(getattr(kind, name), property) for name in derived), kind


def test_what_is_not_said_is_the_documented_default() -> None:
    engine = pb.EngineShape(
        num_layers=1, layers_per_group=1, block_size=1, num_blocks=1, block_bytes=1,
        max_num_seqs=1, max_num_batched_tokens=1,
    )  # fmt: skip
    arrived = read(Snapshot, pb.Snapshot(epoch=1, policy="vllm", engine=engine), "snapshot")

    assert arrived.parameters == PolicyParameters()
    assert (arrived.h2d, arrived.profile, arrived.last_completion_age_s) == (None, None, None)


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (pb.Plan(), "plan.status"),
        (pb.Plan(status=77), "plan.status"),  # type: ignore[arg-type]
        (
            pb.Plan(status=pb.PLAN_STATUS_OPTIMAL, quality=pb.Quality(latency_s=-1.0)),
            "plan.quality.latency_s",
        ),
        (
            pb.Plan(status=pb.PLAN_STATUS_OPTIMAL, quality=pb.Quality(lower_bound_s=float("nan"))),
            "plan.quality.lower_bound_s",
        ),
        (pb.Plan(status=pb.PLAN_STATUS_OPTIMAL, quality=pb.Quality()), "plan.quality.window"),
        (
            pb.Plan(status=pb.PLAN_STATUS_OPTIMAL, placements=[pb.Placement()]),
            "plan.placements[0].request_id",
        ),
    ],
)
def test_a_field_that_holds_what_it_may_not_is_named(plan: pb.Plan, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(Plan, plan, "plan")

    assert caught.value.field == field


def test_members_have_the_names_of_their_wire_values() -> None:
    message = write(
        Plan(epoch=1, policy="vllm", status=PlanStatus.UNDECIDED, placements=()), pb.Plan
    )
    assert message.status == pb.PLAN_STATUS_UNDECIDED
