"""What the OpenAI endpoints take, parameter by parameter, and whom they blame."""

import json
import re
from typing import Any

import pytest

from services.gateway.openai.bodies import ChatCompletionBody, CompletionBody
from services.gateway.openai.parsing import parse_body
from services.gateway.openai.requests import to_generation_requests
from services.gateway.types import Delivery, GenerationRequest, RequestId
from services.generation.conversation import ChatMessage
from services.generation.prompts import ChatPrompt, TextPrompt, TokenPrompt
from services.generation.sampling_params import (
    DEFAULT_SAMPLING,
    AnswerForm,
    SamplingParams,
    StructuredOutputs,
)
from services.kit.errors import InvalidRequestError
from services.pacing.types import NO_SERVICE_LEVEL, Release, ServiceLevel

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(headers: dict[str, str] | None = None, /, **parameters: Any) -> GenerationRequest:
    (request,) = all_of_chat(headers, **parameters)
    return request


def all_of_chat(
    headers: dict[str, str] | None = None, /, **parameters: Any
) -> list[GenerationRequest]:
    body = {"model": "m", "messages": MESSAGES} | parameters
    return to_generation_requests(
        parse_body(ChatCompletionBody, body), headers or {}, RequestId("r")
    )


def complete(**parameters: Any) -> GenerationRequest:
    (request,) = all_of_completion(**parameters)
    return request


def all_of_completion(request_id: str = "r", /, **parameters: Any) -> list[GenerationRequest]:
    body = {"model": "m", "prompt": "Hi"} | parameters
    return to_generation_requests(parse_body(CompletionBody, body), {}, RequestId(request_id))


def test_a_minimal_request_leaves_all_choices_to_the_executor() -> None:
    assert chat() == GenerationRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=ChatPrompt((ChatMessage(role="user", content="Hi"),)),
        sampling=DEFAULT_SAMPLING,
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
        ("top_k", 1),
        ("min_p", 0),
        ("min_p", 1),
        ("presence_penalty", -2),
        ("presence_penalty", 2),
        ("frequency_penalty", -2),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 0.01),
        ("repetition_penalty", 10),
        ("min_tokens", 0),
        ("min_tokens", 7),
        ("ignore_eos", True),
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
    [("a", ("a",)), (["a"], ("a",)), (["a" * 256] * 16, ("a" * 256,) * 16), ([], ())],
)
def test_stop_is_one_string_or_up_to_sixteen(stop, expected) -> None:
    assert chat(stop=stop).sampling.stop == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", [TextPrompt("Hi")]),
        (["Hi"], [TextPrompt("Hi")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([0, 7], [TokenPrompt((0, 7))]),
        ([[0, 7]], [TokenPrompt((0, 7))]),
        ([[0, 7], [1]], [TokenPrompt((0, 7)), TokenPrompt((1,))]),
        (["a", [1]], [TextPrompt("a"), TokenPrompt((1,))]),
    ],
)
def test_a_prompt_is_text_or_token_ids_or_a_list_of_these(prompt, expected) -> None:
    assert [request.prompt for request in all_of_completion(prompt=prompt)] == expected


def test_several_answers_are_requests_of_their_own_prompt_by_prompt() -> None:
    requests = all_of_completion(prompt=["a", "b"], n=2, seed=2**63 - 1)

    assert [request.request_id for request in requests] == ["r", "r.1", "r.2", "r.3"]
    assert {request.parent_id for request in requests} == {"r"}
    assert [request.prompt for request in requests] == [TextPrompt(text) for text in "aabb"]
    # The answers to one prompt differ by their seeds, which stay within 64 bits.
    first, second = 2**63 - 1, -(2**63)
    assert [request.sampling.seed for request in requests] == [first, second, first, second]


def test_without_a_seed_several_answers_have_none() -> None:
    assert [request.sampling.seed for request in all_of_chat(n=2)] == [None, None]


def test_one_answer_has_no_parent() -> None:
    assert chat().parent_id is None


def test_as_many_answers_as_allowed_are_taken_over_all_prompts() -> None:
    assert len(all_of_completion(prompt=["a", "b"], n=64)) == 128
    with pytest.raises(InvalidRequestError) as caught:
        all_of_completion(prompt=["a", "b"], n=65)
    assert caught.value.field == "n"
    with pytest.raises(InvalidRequestError) as caught:
        all_of_completion(prompt=["a"] * 129)
    assert caught.value.field == "prompt"


def test_an_id_must_leave_room_for_the_number_of_an_answer() -> None:
    longest = all_of_completion("x" * 124, n=128)[-1]
    assert len(longest.request_id) == 128
    assert len(all_of_completion("x" * 128)) == 1
    with pytest.raises(InvalidRequestError) as caught:
        all_of_completion("x" * 125, n=2)
    assert caught.value.field == "x-request-id"


def test_a_negative_top_k_is_vllms_way_to_say_all() -> None:
    assert chat(top_k=-1).sampling.top_k == chat(top_k=0).sampling.top_k == 0


def test_biased_and_stopping_tokens_are_taken() -> None:
    sampling = chat(logit_bias={"5": -100, "7": 0.5}, stop_token_ids=[0, 2**31 - 1], priority=-3)
    assert sampling.priority == -3
    assert sampling.sampling == SamplingParams(
        logit_bias={5: -100, 7: 0.5}, stop_token_ids=(0, 2**31 - 1)
    )


@pytest.mark.parametrize(
    ("parameters", "num_logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_chat_asks_for_probabilities_in_two_parameters(parameters, num_logprobs) -> None:
    assert chat(**parameters).sampling.logprobs == num_logprobs


@pytest.mark.parametrize("num_logprobs", [None, 0, 20])
def test_completions_ask_for_probabilities_in_one(num_logprobs) -> None:
    assert complete(logprobs=num_logprobs).sampling.logprobs == num_logprobs


@pytest.mark.parametrize("value", [True, 21, -1])
def test_what_is_no_number_of_probabilities_is_refused(value) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        complete(logprobs=value)
    assert caught.value.field == "logprobs"


def test_a_completion_may_give_its_prompt_back() -> None:
    assert complete(echo=True).echo
    assert not complete().echo


def test_ids_of_tokens_are_told_if_they_are_asked_for() -> None:
    for request in (chat(return_token_ids=True), complete(return_token_ids=True)):
        assert (request.returns_prompt_ids, request.echo) == (True, False)
    assert not chat(return_token_ids=False).returns_prompt_ids
    assert not complete().returns_prompt_ids


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_ids_do_not_tell_reasoning_that_is_not_to_be_told(asked, told) -> None:
    parameters = {"return_token_ids": asked, "include_reasoning": told}
    body = {"model": "m", "messages": MESSAGES} | parameters

    assert parse_body(ChatCompletionBody, body).tells_token_ids == (asked and told)
    assert chat(**parameters).returns_prompt_ids == asked


SCHEMA = {"type": "object", "properties": {"a": {"enum": [None, 1]}, "b": {"const": None}}}


@pytest.mark.parametrize(
    ("parameters", "outputs"),
    [
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            StructuredOutputs(form=AnswerForm.JSON_OBJECT),
        ),
        (
            # A null means something in a schema.
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredOutputs(form=AnswerForm.JSON_SCHEMA, text=json.dumps(SCHEMA)),
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            StructuredOutputs(form=AnswerForm.REGEX, text="a+"),
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"], "regex": None}},
            StructuredOutputs(form=AnswerForm.CHOICE, choices=("a", "b")),
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            StructuredOutputs(form=AnswerForm.GRAMMAR, text='root ::= "a"'),
        ),
    ],
)
def test_the_form_of_an_answer_is_asked_for_in_two_ways(parameters, outputs) -> None:
    for call in (chat, complete):
        assert call(**parameters).sampling.structured_outputs == outputs


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
        ("max_tokens", 2**31 + 0.5),
        ("max_tokens", float("inf")),
        ("max_tokens", True),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", "x"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", "a" * 257),
        ("stop", [1]),
        ("stop", {}),
        ("stream", "yes"),
        ("stream", 1),
        ("model", ""),
        ("model", 3),
        ("evenflow", 1),
        ("n", 0),
        ("n", 129),
        ("n", 1.0),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10.1),
        ("repetition_penalty", float("inf")),
        ("min_tokens", -1),
        ("logit_bias", []),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.0": 1}),
        ("logit_bias", {"9999999999": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": -101}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {str(id): 0 for id in range(1025)}),
        ("stop_token_ids", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [0] * 129),
        ("ignore_eos", 1),
        ("priority", 1.5),
        ("priority", 2**31),
        ("evenflow", {"priority": 2**31}),
        ("response_format", "json"),
        ("response_format", {"type": "xml"}),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"json": {}}),
        ("structured_outputs", {"regex": ""}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"choice": ["a", ""]}),
        ("structured_outputs", {"choice": ["a"] * 1025}),
        ("structured_outputs", {"grammar": "x" * ((64 << 10) + 1)}),
        # What OpenAI or vLLM allow beyond this, and what nobody knows.
        ("suffix", "s"),
        ("best_of", 2),
        ("best_of", True),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "sometimes"),
        ("tool_choice", "required"),  # without tools
        ("parallel_tool_calls", "yes"),
        ("include_reasoning", 1),
        ("reasoning_effort", "utmost"),
        ("chat_template_kwargs", ["enable_thinking"]),
        ("chat_template_kwargs", {"chat_template": "x"}),
        ("modalities", ["audio"]),
        ("audio", {}),
        ("web_search_options", {}),
        ("use_beam_search", True),
        ("bad_words", "x"),
        ("bad_words", [""]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", []),  # no token at all
        ("prompt_logprobs", 1),
        ("skip_special_tokens", 0),
        ("include_stop_str_in_output", "yes"),
        ("truncate_prompt_tokens", 1),
        ("guided_json", {}),
        ("guided_choice", ["a"]),
        ("guided_regex", "a"),
        ("guided_grammar", "a"),
        ("regex", "a"),
        ("chat_template", "{{ messages }}"),
    ],
)
def test_a_parameter_at_fault_is_named(parameter, value) -> None:
    calls = [complete, chat] if parameter not in OF_CHAT else [chat]
    for call in calls:
        with pytest.raises(InvalidRequestError) as caught:
            call(**{parameter: value})

        assert re.split(r"[.\[]", caught.value.field)[0] == parameter
        assert parameter in str(caught.value)


OF_CHAT = ("parallel_tool_calls", "include_reasoning", "reasoning_effort", "chat_template_kwargs")
ADVICE: dict[str, Any] = {
    "user": "u-1",
    "metadata": {"trace": "t"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "s",
    "verbosity": "low",
}
TOOL = {"type": "function", "function": {"name": "f"}}
CUT_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b'}}
USER_PARTS = {
    "role": "user",
    "content": [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "text", "text": "b"},
        {"type": "text", "text": "c"},
    ],
}
TURN_BACK = {
    "role": "assistant",
    "content": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}],
    "annotations": [],
    "tool_calls": [
        {"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ],
}


@pytest.mark.parametrize(
    ("body_class", "advice", "names"),
    [
        (ChatCompletionBody, ADVICE, {*ADVICE}),
        (CompletionBody, ADVICE, {*ADVICE}),
        (
            ChatCompletionBody,
            {"messages": [*MESSAGES, TURN_BACK]},
            {
                "messages.annotations",
                "messages.tool_calls.index",
                "messages.content.cache_control",
            },
        ),
        (
            ChatCompletionBody,
            {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]},
            {"tools.cache_control"},
        ),
        (
            ChatCompletionBody,
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            {"stream_options.include_obfuscation"},
        ),
        (CompletionBody, {"stream_options": {"include_usage": True}}, {"stream_options"}),
        (ChatCompletionBody, {"no_such_parameter": 1}, {"no_such_parameter"}),
        (
            ChatCompletionBody,
            {"tools": [{**TOOL, "function": {"name": "f", "return": {"type": "string"}}}]},
            {"tools.function.return"},
        ),
        (
            ChatCompletionBody,
            {"messages": [USER_PARTS, {"role": "assistant", "tool_calls": [CUT_CALL]}]},
            {"messages.content.image_url", "messages.tool_calls.function.arguments"},
        ),
    ],
)
def test_what_no_answer_depends_on_is_left_out_and_named(body_class, advice, names) -> None:
    good: dict[str, Any] = {"model": "m", "messages": MESSAGES, "prompt": "Hi"}
    body = {name: good[name] for name in body_class.model_fields if name in good} | advice
    ignored: set[str] = set()

    parse_body(body_class, body, ignored)

    assert ignored == names
    with pytest.raises(InvalidRequestError) as refused:
        parse_body(body_class, body | {"evenflow": {"strict": True}})
    assert any(name.startswith(re.sub(r"\[\d+\]", "", refused.value.field)) for name in names)


@pytest.mark.parametrize(
    "neutral",
    [
        {"best_of": 1},
        {"use_beam_search": False},
        {"tools": []},
        {"functions": []},
        {"function_call": "none"},
        {"modalities": ["text"]},
    ],
)
def test_what_asks_for_nothing_is_taken_without_a_word(neutral) -> None:
    body = {"model": "m", "messages": MESSAGES}
    ignored: set[str] = set()

    assert parse_body(ChatCompletionBody, body | neutral, ignored) == parse_body(
        ChatCompletionBody, body
    )
    assert ignored == set()
    with pytest.raises(InvalidRequestError):
        parse_body(ChatCompletionBody, body | neutral | {"evenflow": {"strict": True}})


def only_turn(turn: dict[str, Any]) -> ChatMessage:
    prompt = chat(messages=[turn]).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages[0]


def test_an_image_becomes_a_line_of_text() -> None:
    assert only_turn(USER_PARTS).content == "a\n[image left out: the model takes none]\nbc"


def test_a_strict_client_hears_that_the_model_takes_no_images() -> None:
    with pytest.raises(InvalidRequestError, match="the model takes no images"):
        chat(messages=[USER_PARTS], evenflow={"strict": True})


@pytest.mark.parametrize("arguments", ['{"city": "Os', "[1]", "5", "null", "{}{}", ""])
def test_arguments_that_are_no_object_are_none(arguments) -> None:
    call = CUT_CALL | {"function": {"name": "f", "arguments": arguments}}

    (made,) = only_turn({"role": "assistant", "tool_calls": [call]}).tool_calls

    assert made.arguments == "{}"


def test_half_a_character_in_arguments_is_replaced() -> None:
    arguments = r'{"a": "\ud83d", "b": "\ud83d\ude00"}'
    call = CUT_CALL | {"function": {"name": "f", "arguments": arguments}}

    (made,) = only_turn({"role": "assistant", "tool_calls": [call]}).tool_calls

    assert made.arguments == '{"a": "\N{REPLACEMENT CHARACTER}", "b": "\N{GRINNING FACE}"}'


@pytest.mark.parametrize(
    "said",
    [
        {"content": None, "refusal": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": "No.", "refusal": None},
    ],
)
def test_what_an_assistant_refused_is_what_it_said(said) -> None:
    assert only_turn({"role": "assistant", **said}).content == "No."


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: must be greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens: must be an integer"),
        ({"temperature": 3}, "temperature: must be less than or equal to 2"),
        ({"temperature": "hot"}, "temperature: must be a number"),
        ({"temperature": float("nan")}, "temperature: must be a finite number"),
        ({"stream": "yes"}, "stream: must be a boolean"),
        ({"model": 5}, "model: must be a string"),
        ({"model": ""}, "model: must have at least 1 character"),
        ({"model": None}, "model: required"),
        ({"messages": ["Hi"]}, "messages[0]: must be an object"),
        ({"messages": "Hi"}, "messages: must be a list"),
        ({"messages": []}, "messages: must have at least 1 item, not 0"),
        ({"evenflow": 1}, "evenflow: must be an object"),
        ({"evenflow": {"slo": 1}}, "evenflow.slo: this parameter is not supported"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs: must be an object"),
        ({"tools": [TOOL | {"type": "x"}]}, "tools[0].type: must be 'function'"),
        ({"response_format": {"type": "xml"}}, "response_format.type: must be 'text', 'json_obj"),
        ({"cache_salt": "\n"}, "cache_salt: must match pattern '^[^"),
        ({"stop": [1]}, "stop: must be a non-empty string or a list of them"),
        ({"top_logprobs": 99}, "top_logprobs: must be less than or equal to 20"),
    ],
)
def test_a_fault_is_told_in_a_sentence(stated, message) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        chat(**stated)

    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
        ),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"description": "x" * (64 << 10)}},
                }
            },
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"evenflow": {"slo_ttft_ms": 0}}, "evenflow.slo_ttft_ms"),
        ({"evenflow": {"slo_tpot_ms": -1}}, "evenflow.slo_tpot_ms"),
        ({"evenflow": {"slo_tbt_ms": float("inf")}}, "evenflow.slo_tbt_ms"),
        ({"evenflow": {"consumption_rate_tps": "5"}}, "evenflow.consumption_rate_tps"),
        ({"evenflow": {"consumption_rate_tps": 1e-6}}, "evenflow.consumption_rate_tps"),
        ({"evenflow": {"slo_tbt_ms": 1e-3}}, "evenflow.slo_tbt_ms"),
        ({"evenflow": {"pace_tail": 1}}, "evenflow.pace_tail"),
        ({"evenflow": {"release": "soon"}}, "evenflow.release"),
        ({"evenflow": {"max_in_hand_s": 3_601}}, "evenflow.max_in_hand_s"),
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
    ["", [], [""], ["a", 1], [1, "a"], [[]], [1, -1], [1, 2**31], [True], [1.0], {}, 7, [[[1]]]],
)
def test_what_is_no_prompt_is_refused(prompt) -> None:
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


@pytest.mark.parametrize("content", ["", None, []])
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_turn_may_be_empty_and_have_a_name(role, content) -> None:
    turn = {"role": role, "content": content, "name": "n"}

    assert chat(messages=[turn]).prompt == ChatPrompt(
        (ChatMessage(role=role, content="", name="n"),)
    )


def test_null_is_the_same_as_absent_even_for_what_is_not_supported() -> None:
    nulls = dict.fromkeys(
        ["temperature", "stop", "stream_options", "evenflow", "tools", "n", "logit_bias"]
    )

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


LLM_D = {"x-llm-d-slo-ttft-ms": "1000", "x-llm-d-slo-tpot-ms": "50"}


@pytest.mark.parametrize("more", [{}, {"x-slo-ttft-ms": "1e3", "x-slo-tpot-ms": "50.0"}])
def test_bounds_in_llm_ds_headers_are_taken(more: dict[str, str]) -> None:
    assert chat({**LLM_D, **more}).service_level == ServiceLevel(slo_ttft_s=1.0, slo_tpot_s=0.05)


@pytest.mark.parametrize("bound", ["ttft", "tpot"])
def test_two_headers_that_differ_are_both_named(bound: str) -> None:
    names = [f"x-slo-{bound}-ms", f"x-llm-d-slo-{bound}-ms"]
    with pytest.raises(InvalidRequestError, match=f"{names[0]} and {names[1]}: ") as caught:
        chat(LLM_D | {names[0]: "49"})

    assert caught.value.field == names[0]


FAIRNESS = ("x-evenflow-fairness-id", "x-llm-d-inference-fairness-id")


def test_a_fairness_id_is_taken_from_either_header() -> None:
    assert chat({}).fairness_id == chat({FAIRNESS[0]: ""}).fairness_id == ""
    assert [chat({name: "team a"}).fairness_id for name in FAIRNESS] == ["team a", "team a"]
    assert chat(dict.fromkeys(FAIRNESS, "a")).fairness_id == "a"
    assert chat({FAIRNESS[0]: "a" * 256}).fairness_id == "a" * 256


def test_two_fairness_ids_that_differ_and_one_that_is_too_long_are_named() -> None:
    with pytest.raises(InvalidRequestError, match=f"{FAIRNESS[0]} and {FAIRNESS[1]}: ") as caught:
        chat({FAIRNESS[0]: "a", FAIRNESS[1]: "b"})
    assert caught.value.field == FAIRNESS[0]
    with pytest.raises(InvalidRequestError, match="at most 256") as caught:
        chat({FAIRNESS[1]: "a" * 257})
    assert caught.value.field == FAIRNESS[1]


@pytest.mark.parametrize("name", [*HEADERS, *LLM_D])
@pytest.mark.parametrize("value", ["", "fast", "0", "-1", "nan", "inf", "1e-4", "1e8"])
def test_a_header_at_fault_is_named(name, value) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat({name: value})

    assert caught.value.field == name


@pytest.mark.parametrize("release", Release)
def test_when_text_goes_out_is_the_client_s_choice(release: Release) -> None:
    assert chat(evenflow={"release": release.value}).service_level.release is release
    assert chat().service_level.release is None


@pytest.mark.parametrize("rate_tps", [10, 10.1])
def test_a_reader_as_fast_as_the_tbt_bound_is_taken(rate_tps) -> None:
    headers = {"x-consumption-rate-tps": str(rate_tps), "x-slo-tbt-ms": "100"}  # 1 / 10 = 100 ms

    assert chat(headers).service_level.consumption_rate_tps == rate_tps


def test_a_reader_slower_than_the_tbt_bound_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat({"x-consumption-rate-tps": "9.9", "x-slo-tbt-ms": "100"})

    assert caught.value.field == "x-consumption-rate-tps"
