"""Submits are checked before they cost anything; frames keep every field."""

from dataclasses import replace
from typing import Any

import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from services.executor import convert
from services.executor.observation import (
    EngineObservation,
    GroupPlace,
    PrefixObservation,
    RequestObservation,
)
from services.executor.serving.step_stream import Acceptance, Frame, Output
from services.executor.types import Failure, RejectCode, Rejection, Resume, Submission, Token
from services.generation.conversation import (
    ChatMessage,
    ConversationOptions,
    Tool,
    ToolCall,
    ToolCallPart,
    ToolChoice,
)
from services.generation.finish import FinishReason
from services.generation.prompts import ChatPrompt, TextPrompt, TokenPrompt
from services.generation.sampling_params import DEFAULT_SAMPLING
from services.kit.errors import InvalidRequestError
from services.pacing.cause import Cause
from services.pacing.types import ServiceLevel
from services.placement.run.reason import Reason
from services.placement.types import RequestPhase


def make_submit(**overrides: Any) -> pb.Submit:
    fields: dict[str, Any] = {"request_id": "r", "generation": 1, "model": "m", "text": "hi"}
    return pb.Submit(**{**fields, **overrides})


def only(converted: list[Submission] | Rejection) -> Submission:
    assert not isinstance(converted, Rejection), converted
    (submission,) = converted
    return submission


def test_unset_sampling_means_openai_defaults() -> None:
    submission = only(convert.submissions_from_proto(make_submit()))

    assert submission.sampling == DEFAULT_SAMPLING
    assert submission.service_level == ServiceLevel()


def test_a_temperature_of_zero_is_not_unset() -> None:
    sampling = gen.SamplingParams(temperature=0, seed=0)
    submission = only(convert.submissions_from_proto(make_submit(sampling=sampling)))

    assert submission.sampling.temperature == 0
    assert submission.sampling.seed == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "hi"}, TextPrompt(text="hi")),
        ({"text": None, "token_ids": gen.TokenIds(ids=[3, 4])}, TokenPrompt(token_ids=(3, 4))),
        (
            {
                "text": None,
                "chat": pb.Chat(messages=[gen.ChatMessage(role="user", content="hi")]),
            },
            ChatPrompt(messages=(ChatMessage(role="user", content="hi"),)),
        ),
    ],
)
def test_each_kind_of_input_is_kept(fields: dict[str, Any], expected: object) -> None:
    submission = only(convert.submissions_from_proto(make_submit(**fields)))

    assert submission.prompt == expected


@pytest.mark.parametrize("field", ["echo", "returns_prompt_ids"])
def test_what_is_to_be_given_back_of_a_prompt_is_kept(field) -> None:
    plain = only(convert.submissions_from_proto(make_submit()))

    asking = only(convert.submissions_from_proto(make_submit(**{field: True})))

    assert asking == replace(plain, **{field: True})


def test_further_answers_share_all_but_their_ids_seeds_and_traces() -> None:
    further = [
        pb.FurtherAnswer(request_id="r.1", seed=6),
        pb.FurtherAnswer(request_id="r.2", trace_context=pb.TraceContext(traceparent="00-1-2-01")),
    ]
    sampling = gen.SamplingParams(temperature=0.5, seed=5)
    submissions = convert.submissions_from_proto(
        make_submit(sampling=sampling, priority=3, further_answers=further)
    )

    assert not isinstance(submissions, Rejection)
    assert [(one.request_id, one.sampling.seed) for one in submissions] == [
        ("r", 5),
        ("r.1", 6),
        ("r.2", None),
    ]
    assert all(one.prompt is submissions[0].prompt for one in submissions)
    assert [(one.sampling.temperature, one.priority) for one in submissions] == [(0.5, 3)] * 3
    assert [one.trace and one.trace.traceparent for one in submissions] == [None, None, "00-1-2-01"]


def test_a_further_answer_without_an_id_is_refused() -> None:
    rejection = convert.submissions_from_proto(make_submit(further_answers=[pb.FurtherAnswer()]))

    assert isinstance(rejection, Rejection)
    assert rejection.field == "request_id"


RESUME: dict[str, Any] = {
    "output_ids": [5, 6, 7],
    "max_tokens": 3,
    "num_delivered_tokens": 3,
    "last_due_age_s": -2.5,
    "arrived_age_s": 9.0,
    "num_cached_tokens": 32,
    "prompt_digest": 2**64 - 1,
}


def test_what_an_answer_has_already_is_kept() -> None:
    submit = make_submit(resume=pb.Resume(**RESUME), rendered_at_s=1.8e9)
    submission = only(convert.submissions_from_proto(submit))

    assert submission.resume == Resume(**RESUME | {"output_ids": (5, 6, 7)})
    assert submission.rendered_at_s == 1.8e9
    assert only(convert.submissions_from_proto(make_submit())).resume is None


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"output_ids": []}, "resume.output_ids"),
        ({"output_ids": [5, -1]}, "resume.output_ids"),
        ({"max_tokens": 2}, "resume.max_tokens"),
        ({"num_delivered_tokens": -1}, "resume.num_delivered_tokens"),
        ({"num_delivered_tokens": 4}, "resume.num_delivered_tokens"),
        ({"num_retold_tokens": -1}, "resume.num_retold_tokens"),
        ({"num_retold_tokens": 4}, "resume.num_retold_tokens"),
        ({"last_due_age_s": float("nan")}, "resume.last_due_age_s"),
        ({"arrived_age_s": -0.1}, "resume.arrived_age_s"),
        ({"arrived_age_s": float("inf")}, "resume.arrived_age_s"),
        ({"num_cached_tokens": -1}, "resume.num_cached_tokens"),
    ],
)
def test_what_no_answer_can_have_is_refused(overrides: dict[str, Any], field: str) -> None:
    submit = make_submit(resume=pb.Resume(**RESUME | overrides))
    rejection = convert.submissions_from_proto(submit)

    assert isinstance(rejection, Rejection)
    assert (rejection.code, rejection.field) == (RejectCode.INVALID_ARGUMENT, field)


def test_one_answer_goes_on_at_a_time() -> None:
    further = [pb.FurtherAnswer(request_id="r.1")]
    submit = make_submit(resume=pb.Resume(**RESUME), further_answers=further)
    rejection = convert.submissions_from_proto(submit)

    assert isinstance(rejection, Rejection)
    assert (rejection.code, rejection.field) == (RejectCode.INVALID_ARGUMENT, "resume")


@pytest.mark.parametrize("now_s", [-1.0, 1e12, float("nan")])
def test_an_instant_that_no_calendar_knows_is_refused(now_s: float) -> None:
    rejection = convert.submissions_from_proto(make_submit(rendered_at_s=now_s))

    assert isinstance(rejection, Rejection)
    assert rejection.field == "rendered_at_s"


def test_the_service_level_is_kept() -> None:
    level = gen.ServiceLevel(slo_ttft_s=1, slo_tbt_s=0.25, pace_tail=True)
    submission = only(convert.submissions_from_proto(make_submit(service_level=level)))

    assert submission.service_level == ServiceLevel(slo_ttft_s=1, slo_tbt_s=0.25, pace_tail=True)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"generation": 0}, "generation"),
        ({"text": None}, "prompt"),
        ({"text": None, "token_ids": gen.TokenIds()}, "prompt"),
        ({"text": None, "chat": pb.Chat()}, "messages"),
        ({"sampling": gen.SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"sampling": gen.SamplingParams(temperature=-0.1)}, "temperature"),
        ({"sampling": gen.SamplingParams(temperature=2.1)}, "temperature"),
        ({"sampling": gen.SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": gen.SamplingParams(top_p=0)}, "top_p"),
        ({"sampling": gen.SamplingParams(top_p=1.1)}, "top_p"),
        ({"sampling": gen.SamplingParams(stop=["a"] * 17)}, "stop"),
        ({"sampling": gen.SamplingParams(stop=[""])}, "stop"),
        (
            {
                "text": None,
                "chat": pb.Chat(
                    messages=[gen.ChatMessage(role="user", content="x")],
                    options=gen.ConversationOptions(named_tool="f"),
                ),
            },
            "tool_choice",
        ),
        ({"service_level": gen.ServiceLevel(slo_ttft_s=0)}, "slo_ttft_s"),
        ({"service_level": gen.ServiceLevel(slo_tbt_s=float("inf"))}, "slo_tbt_s"),
        (
            {"service_level": gen.ServiceLevel(consumption_rate_tps=-1)},
            "consumption_rate_tps",
        ),
    ],
)
def test_a_malformed_submit_is_refused_naming_the_field(
    overrides: dict[str, Any], field: str
) -> None:
    rejection = convert.submissions_from_proto(make_submit(**overrides))

    assert isinstance(rejection, Rejection)
    assert rejection.code is RejectCode.INVALID_ARGUMENT
    assert rejection.field == field


@pytest.mark.parametrize(
    "overrides",
    [
        {"request_id": "x" * 128},
        {"sampling": gen.SamplingParams(max_tokens=1, temperature=2, top_p=1, stop=["a"] * 16)},
    ],
)
def test_the_limits_themselves_are_allowed(overrides: dict[str, Any]) -> None:
    assert only(convert.submissions_from_proto(make_submit(**overrides)))


@pytest.mark.parametrize(
    "message",
    [
        None,
        pb.StreamRequest(),
        pb.StreamRequest(abort=pb.Abort(request_id="r")),
        pb.StreamRequest(hello=pb.Hello()),
        pb.StreamRequest(hello=pb.Hello(gateway_id="g", epoch=-1)),
    ],
)
def test_a_stream_must_begin_with_hello(message: pb.StreamRequest | None) -> None:
    with pytest.raises(InvalidRequestError):
        convert.hello_from_proto(message)


def test_a_frame_keeps_every_field() -> None:
    rejection = Rejection(code=RejectCode.CONTEXT_LENGTH, field="messages", message="too long")
    frame = Frame(
        sequence=4,
        accepted={"a": Acceptance(7, 5, 2**64 - 1)},
        rejected=[("b", rejection)],
        outputs={
            "c": Output(first_token_index=2, tokens=[Token(9, "é")], ending=FinishReason.STOP),
            "d": Output(
                first_token_index=0, ending=Failure(message="the engine failed", retryable=True)
            ),
        },
        num_engine_steps=12,
        is_leaving=True,
    )

    assert convert.frame_to_proto(frame) == pb.StreamResponse(
        sequence=4,
        accepted=[
            pb.Accepted(request_id="a", num_prompt_tokens=7, max_tokens=5, prompt_digest=2**64 - 1)
        ],
        rejected=[
            pb.Rejected(
                request_id="b",
                code=pb.REJECT_CODE_CONTEXT_LENGTH,
                field="messages",
                message="too long",
            )
        ],
        outputs=[
            pb.RequestOutput(
                request_id="c",
                first_token_index=2,
                tokens=[pb.Token(id=9, text="é")],
                ending=pb.Ending(finish_reason=gen.FINISH_REASON_STOP),
            ),
            pb.RequestOutput(
                request_id="d",
                ending=pb.Ending(failure=pb.Failure(retryable=True, message="the engine failed")),
            ),
        ],
        num_engine_steps=12,
        is_leaving=True,
    )


def test_an_engine_without_a_step_says_so() -> None:
    assert convert.frame_to_proto(Frame(sequence=0)).HasField("num_engine_steps")


@pytest.mark.parametrize("code", list(RejectCode))
def test_every_reject_code_has_a_proto_value(code: RejectCode) -> None:
    frame = Frame(sequence=0, rejected=[("a", Rejection(code=code, message="no"))])

    sent = convert.frame_to_proto(frame).rejected[0].code

    assert pb.RejectCode.Name(sent) == f"REJECT_CODE_{code.name}"


def test_a_running_requests_output_has_no_ending() -> None:
    frame = Frame(sequence=0, outputs={"a": Output(first_token_index=0, tokens=[Token(1, "")])})

    assert not convert.frame_to_proto(frame).outputs[0].HasField("ending")


@pytest.mark.parametrize(("asked", "interval_s"), [(0.0, 0.5), (4.0, 0.25), (20.0, 0.05)])
def test_the_rate_of_a_watch(asked: float, interval_s: float) -> None:
    request = pb.WatchRequestsRequest(max_updates_per_s=asked)

    assert convert.watch_interval_s(request) == interval_s


@pytest.mark.parametrize("asked", [-1.0, 20.1, float("inf"), float("nan")])
def test_an_impossible_rate_of_a_watch_is_refused(asked: float) -> None:
    with pytest.raises(InvalidRequestError):
        convert.watch_interval_s(pb.WatchRequestsRequest(max_updates_per_s=asked))


def test_an_observation_keeps_every_field() -> None:
    request = RequestObservation(
        request_id="a",
        phase=RequestPhase.PAUSED,
        num_prompt_tokens=1,
        num_computed_tokens=2,
        num_generated_tokens=3,
        num_delivered_tokens=4,
        num_deposited_tokens=5,
        num_late_tokens=6,
        late_cause=Cause.COPIES,
        interval_s=0.5,
        pace_tail=True,
        why=Reason.READER,
        residency="ROB",
    )
    observation = EngineObservation(
        requests=(request,),
        num_steps=7,
        observed_step_s=0.25,
        num_pool_blocks=8,
        num_free_pool_blocks=9,
        num_cached_tokens=10,
        num_host_blocks=12,
        num_free_host_blocks=13,
        link_bytes_per_s=14.0,
        tokens_per_step=2.5,
        prefixes=(PrefixObservation(request_ids=("a",), num_tokens=11, residency="O"),),
    )

    proto = convert.observation_to_proto(observation)

    assert not proto.HasField("predicted_step_s")
    assert proto == pb.WatchRequestsResponse(
        requests=[
            pb.ObservedRequest(
                request_id="a",
                state=pb.REQUEST_STATE_PAUSED,
                num_prompt_tokens=1,
                num_computed_tokens=2,
                num_generated_tokens=3,
                num_delivered_tokens=4,
                num_deposited_tokens=5,
                num_late_tokens=6,
                late_cause=gen.DELAY_CAUSE_COPIES,
                release_interval_s=0.5,
                pace_tail=True,
                why="reader",
                why_text="its reader has stopped",
                residency=[
                    pb.RESIDENCY_RESIDENT,
                    pb.RESIDENCY_OFFLOADED,
                    pb.RESIDENCY_RESTORING,
                ],
            )
        ],
        num_steps=7,
        observed_step_s=0.25,
        num_pool_blocks=8,
        num_free_pool_blocks=9,
        num_cached_tokens=10,
        num_host_blocks=12,
        num_free_host_blocks=13,
        link_bytes_per_s=14.0,
        tokens_per_step=2.5,
        prefixes=[
            pb.ObservedPrefix(request_ids=["a"], num_tokens=11, residency=[pb.RESIDENCY_OFFLOADED])
        ],
    )


def test_every_state_and_residency_has_a_name_on_the_wire() -> None:
    assert set(convert._REQUEST_STATES) == set(RequestPhase)
    assert set(convert._RESIDENCIES) == {residency.value for residency in GroupPlace}


def test_a_token_keeps_thoughts_and_calls() -> None:
    parts = (ToolCallPart(0, "c", "f", "{"), ToolCallPart(1, arguments="}"))
    token = Token(9, "x", reasoning="hm", tool_calls=parts)
    output = Output(
        first_token_index=0,
        tokens=[token],
        ending=FinishReason.TOOL_CALLS,
        num_reasoning_tokens=1,
    )
    (sent,) = convert.frame_to_proto(Frame(sequence=0, outputs={"r": output})).outputs

    assert list(sent.tokens) == [
        pb.Token(
            id=9,
            text="x",
            reasoning="hm",
            tool_calls=[
                gen.ToolCallPart(index=0, id="c", name="f", arguments="{"),
                gen.ToolCallPart(index=1, arguments="}"),
            ],
        )
    ]
    assert sent.ending == pb.Ending(
        finish_reason=gen.FINISH_REASON_TOOL_CALLS, num_reasoning_tokens=1
    )


def test_a_conversation_keeps_its_options_and_calls() -> None:
    chat = pb.Chat(
        messages=[
            gen.ChatMessage(
                role="assistant", tool_calls=[gen.ToolCall(id="c", name="f", arguments="{}")]
            ),
            gen.ChatMessage(role="tool", tool_call_id="c", content="1"),
        ],
        options=gen.ConversationOptions(tools=[gen.Tool(name="f")], reasoning_effort="low"),
    )
    call = ToolCall(id="c", name="f", arguments="{}")

    assert convert.chat_from_proto(chat) == ChatPrompt(
        messages=(
            ChatMessage(role="assistant", content="", tool_calls=(call,)),
            ChatMessage(role="tool", content="1", tool_call_id="c"),
        ),
        options=ConversationOptions(
            tools=(Tool(name="f"),), tool_choice=ToolChoice.AUTO, reasoning_effort="low"
        ),
    )


def test_whose_prefixes_a_request_may_share_is_kept() -> None:
    assert (
        only(convert.submissions_from_proto(make_submit(cache_salt="alice"))).cache_salt == "alice"
    )
    assert only(convert.submissions_from_proto(make_submit())).cache_salt == ""
