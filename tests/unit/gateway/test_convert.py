"""What the gRPC edge takes, field by field, and what it says to the executor."""

import pytest

from evenflow.executor.v1 import executor_pb2
from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from services.gateway import convert
from services.gateway.types import Finish, GenerationRequest, RequestId
from services.generation.finish import FinishReason
from services.generation.prompts import ChatPrompt, TextPrompt, TokenPrompt
from services.kit.errors import InvalidRequestError
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("name", ["slo_ttft_s", "slo_tpot_s", "slo_tbt_s", "consumption_rate_tps"])
@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF])
def test_a_bound_out_of_range_is_named(name, value) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        convert.checked_service_level(gen.ServiceLevel(**{name: value}))

    assert caught.value.field == f"service_level.{name}"


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("slo_ttft_s", 1e-3, 3_600),
        ("slo_tpot_s", 1e-3, 3_600),
        ("slo_tbt_s", 1e-3, 3_600),
        ("consumption_rate_tps", 0.5, 1_000),
    ],
)
def test_the_range_of_a_bound_has_two_ends(name, low, high) -> None:
    for value in (low, high):
        level = gen.ServiceLevel(**{name: value})
        assert getattr(convert.checked_service_level(level), name) == value
    for value in (low * 0.999, high * 1.001):
        with pytest.raises(InvalidRequestError, match=f"service_level.{name}: must be from"):
            convert.checked_service_level(gen.ServiceLevel(**{name: value}))


def test_a_service_level_is_taken_as_it_is() -> None:
    level = gen.ServiceLevel(slo_tbt_s=0.1, consumption_rate_tps=10, pace_tail=True)

    assert convert.checked_service_level(level) == ServiceLevel(
        slo_tbt_s=0.1, consumption_rate_tps=10.0, pace_tail=True
    )
    assert convert.checked_service_level(gen.ServiceLevel()) == NO_SERVICE_LEVEL


def test_a_reader_slower_than_the_tbt_bound_is_refused() -> None:
    level = gen.ServiceLevel(slo_tbt_s=0.1, consumption_rate_tps=9.9)

    with pytest.raises(InvalidRequestError, match="consumption_rate_tps"):
        convert.checked_service_level(level)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"text": ""}, "text"),
        ({"token_ids": gen.TokenIds()}, "token_ids"),
        ({"token_ids": gen.TokenIds(ids=[1, -1])}, "token_ids.ids"),
    ],
)
def test_what_is_no_prompt_is_refused(fields, field) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        convert.prompt_from_proto(pb.GenerateRequest(**fields))

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([gen.ChatMessage(role="wizard", content="x")], "messages[0].role"),
        ([gen.ChatMessage(content="x")], "messages[0].role"),
    ],
)
def test_what_is_no_conversation_is_refused(messages, field) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        convert.chat_from_proto(messages, gen.ConversationOptions())

    assert caught.value.field == field


def test_a_silent_assistant_is_a_turn() -> None:
    prompt = convert.chat_from_proto([gen.ChatMessage(role="assistant")], gen.ConversationOptions())

    assert len(prompt.messages) == 1


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (TextPrompt("Hi"), executor_pb2.Submit(text="Hi")),
        (TokenPrompt((1, 2)), executor_pb2.Submit(token_ids=gen.TokenIds(ids=[1, 2]))),
        (ChatPrompt(()), executor_pb2.Submit(chat=executor_pb2.Chat())),
    ],
)
def test_a_submit_says_what_was_asked_and_nothing_else(prompt, expected) -> None:
    request = GenerationRequest(request_id=RequestId("r"), model="m", prompt=prompt)
    expected.request_id, expected.model, expected.generation = "r", "m", 2
    expected.sampling.SetInParent()
    expected.holder.request_class = "unpaced"

    assert convert.submit_to_proto(request, 2).SerializeToString() == expected.SerializeToString()


def test_every_finish_reason_makes_the_round_trip() -> None:
    for reason in FinishReason:
        finish = Finish(reason=reason, num_prompt_tokens=1, num_output_tokens=2)
        ending = executor_pb2.Ending(finish_reason=convert.finish_to_proto(finish).reason)
        assert convert.ending_from_proto(ending) == (reason, None, 0, "")


def test_a_finish_reason_of_a_later_version_is_a_normal_end() -> None:
    ending = executor_pb2.Ending(
        finish_reason=99,  # type: ignore[arg-type]
        num_reasoning_tokens=0,
        num_cached_tokens=4,
        stop_string="END",
    )

    assert convert.ending_from_proto(ending) == (FinishReason.STOP, 0, 4, "END")


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:192.0.2.7:4711", "192.0.2.7"),
        ("ipv6:%5B2001:db8::7%5D:4711", "2001:db8::7"),
        ("unix:", ""),
        ("unix:/run/evenflow.sock", ""),
    ],
)
def test_a_grpc_client_s_address_is_as_http_s_edge_says_it(peer: str, host: str) -> None:
    assert convert.host_from_peer(peer) == host
