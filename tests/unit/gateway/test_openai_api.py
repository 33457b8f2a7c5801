"""What the OpenAI endpoints take, parameter by parameter, and whom they blame."""

from typing import Any

import pytest

from services.gateway.openai_api import (
    ChatCompletionBody,
    CompletionBody,
    parse_body,
    to_generation_request,
)
from services.gateway.types import (
    ChatMessage,
    ChatPrompt,
    Delivery,
    GenerationRequest,
    RequestId,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from services.kit.errors import InvalidRequestError
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(headers: dict[str, str] | None = None, /, **parameters: Any) -> GenerationRequest:
    body = {"model": "m", "messages": MESSAGES} | parameters
    return to_generation_request(
        parse_body(ChatCompletionBody, body), headers or {}, RequestId("r")
    )


def complete(**parameters: Any) -> GenerationRequest:
    body = {"model": "m", "prompt": "Hi"} | parameters
    return to_generation_request(parse_body(CompletionBody, body), {}, RequestId("r"))


def test_a_minimal_request_leaves_all_choices_to_the_executor() -> None:
    assert chat() == GenerationRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=ChatPrompt((ChatMessage(role="user", content="Hi"),)),
        sampling=SamplingParams(),
        service_level=NO_SERVICE_LEVEL,
        delivery=Delivery.WHOLE,
    )


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("max_tokens", 1),
        ("temperature", 0),
        ("temperature", 2),
        ("temperature", 0.7),
        ("top_p", 1),
        ("top_p", 0.001),
        ("seed", 0),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
    ],
)
def test_a_value_in_range_is_taken(parameter, value) -> None:
    assert chat(**{parameter: value}).sampling == SamplingParams(**{parameter: value})
    assert complete(**{parameter: value}).sampling == SamplingParams(**{parameter: value})


def test_both_names_of_the_token_limit_are_taken() -> None:
    assert chat(max_tokens=5).sampling.max_tokens == 5
    assert chat(max_completion_tokens=6).sampling.max_tokens == 6


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("a", ("a",)), (["a"], ("a",)), (["a", "b", "c", "d"], ("a", "b", "c", "d")), ([], ())],
)
def test_stop_is_one_string_or_up_to_four(stop, expected) -> None:
    assert chat(stop=stop).sampling.stop == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", TextPrompt("Hi")),
        (["Hi"], TextPrompt("Hi")),
        ([0, 7], TokenPrompt((0, 7))),
        ([[0, 7]], TokenPrompt((0, 7))),
    ],
)
def test_a_prompt_is_text_or_token_ids_or_a_list_of_one(prompt, expected) -> None:
    assert complete(prompt=prompt).prompt == expected


def test_text_parts_form_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    prompt = chat(messages=[{"role": "user", "content": parts}]).prompt

    assert prompt == ChatPrompt((ChatMessage(role="user", content="ab"),))


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", 2**31),
        ("max_tokens", True),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", "x"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 5),
        ("stop", [1]),
        ("stop", {}),
        ("stream", "yes"),
        ("stream", 1),
        ("stream_options", {}),
        ("model", ""),
        ("model", 3),
        ("evenflow", 1),
        # What OpenAI allows beyond this, and what nobody knows.
        ("n", 1),
        ("logprobs", True),
        ("logit_bias", {}),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.5),
        ("user", "u"),
        ("suffix", "s"),
        ("best_of", 1),
        ("echo", False),
        ("no_such_parameter", 1),
    ],
)
def test_a_parameter_at_fault_is_named(parameter, value) -> None:
    for call in (chat, complete):
        with pytest.raises(InvalidRequestError) as caught:
            call(**{parameter: value})

        assert caught.value.field.split("[")[0] == parameter
        assert parameter in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        ({"tools": []}, "tools"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"evenflow": {"slo_ttft_ms": 0}}, "evenflow.slo_ttft_ms"),
        ({"evenflow": {"slo_tpot_ms": -1}}, "evenflow.slo_tpot_ms"),
        ({"evenflow": {"slo_tbt_ms": float("inf")}}, "evenflow.slo_tbt_ms"),
        ({"evenflow": {"consumption_rate_tps": "5"}}, "evenflow.consumption_rate_tps"),
        ({"evenflow": {"pace_tail": 1}}, "evenflow.pace_tail"),
        ({"evenflow": {"slo": 1}}, "evenflow.slo"),
        (
            {"evenflow": {"consumption_rate_tps": 10, "slo_tbt_ms": 99}},
            "evenflow.consumption_rate_tps",
        ),
    ],
)
def test_a_nested_fault_is_named_by_its_path(parameters, field) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**parameters)

    assert caught.value.field == field


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], ["a", "b"], [[1, 2], [3]], [[]], [1, -1], [1, 2**31], [True], [1.0], {}, 7],
)
def test_what_is_not_one_prompt_is_refused(prompt) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        complete(prompt=prompt)

    assert caught.value.field == "prompt"


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_parameter_is_named(missing) -> None:
    body = {"model": "m", "messages": MESSAGES}
    del body[missing]

    with pytest.raises(InvalidRequestError) as caught:
        parse_body(ChatCompletionBody, body)

    assert caught.value.field == missing


@pytest.mark.parametrize("body_class", [ChatCompletionBody, CompletionBody])
def test_each_endpoint_refuses_the_other_s_input(body_class) -> None:
    body = {"model": "m", "messages": MESSAGES, "prompt": "Hi"}

    with pytest.raises(InvalidRequestError) as caught:
        parse_body(body_class, body)

    assert caught.value.field == ("prompt" if body_class is ChatCompletionBody else "messages")


def test_null_is_the_same_as_absent_even_for_what_is_not_supported() -> None:
    nulls = dict.fromkeys(["temperature", "stop", "stream_options", "evenflow", "tools", "n"])

    assert chat(**nulls) == chat()
    assert chat(evenflow={"slo_ttft_ms": None}) == chat()


HEADERS = {
    "x-slo-ttft-ms": "1000",
    "x-slo-tpot-ms": "50",
    "x-slo-tbt-ms": "200.5",
    "x-consumption-rate-tps": "10",
}


def test_the_service_level_comes_from_headers() -> None:
    assert chat(HEADERS).service_level == ServiceLevel(
        slo_ttft_s=1.0, slo_tpot_s=0.05, slo_tbt_s=0.2005, consumption_rate_tps=10.0
    )


def test_the_body_wins_over_headers_bound_by_bound() -> None:
    level = chat(HEADERS, evenflow={"slo_tbt_ms": 300, "pace_tail": True}).service_level

    assert level == ServiceLevel(
        slo_ttft_s=1.0,
        slo_tpot_s=0.05,
        slo_tbt_s=0.3,
        consumption_rate_tps=10.0,
        pace_tail=True,
    )


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("value", ["", "fast", "0", "-1", "nan", "inf"])
def test_a_header_at_fault_is_named(name, value) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat({name: value})

    assert caught.value.field == name


@pytest.mark.parametrize("rate_tps", [10, 10.1])
def test_a_reader_as_fast_as_the_tbt_bound_is_taken(rate_tps) -> None:
    headers = {"x-consumption-rate-tps": str(rate_tps), "x-slo-tbt-ms": "100"}  # 1 / 10 = 100 ms

    assert chat(headers).service_level.consumption_rate_tps == rate_tps


def test_a_reader_slower_than_the_tbt_bound_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat({"x-consumption-rate-tps": "9.9", "x-slo-tbt-ms": "100"})

    assert caught.value.field == "x-consumption-rate-tps"
