"""One real engine behind a real channel: tokens, endings, refusals, aborts."""

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.executor_client import ANSWER_TIMEOUT_S, MODEL, Answer, GatewayStream, places
from lab.models import MAX_MODEL_LEN
from lab.stack.executor_process import MAX_NUM_SEQS, ExecutorProcess
from lab.stack.metrics import sums_by_name
from tests.executor_stock import StockAnswers, near, stock_answers
from tests.stock_requests import GREEDY, PROMPT, STREAM

pytestmark = pytest.mark.timeout(3_600)

# A minute of steps and more: longer than other work keeps a test from its next word.
LONG = {"temperature": 0, "max_tokens": MAX_MODEL_LEN - 512}


@pytest.fixture(scope="module")
def stock() -> StockAnswers:
    """Stock vLLM's answers, without our scheduler."""
    return stock_answers("stream")


@pytest.fixture(scope="module")
def executor(plain_executor: ExecutorProcess) -> ExecutorProcess:
    return plain_executor


async def ask_as_stock(gateway: GatewayStream, name: str) -> Answer:
    request = STREAM[name]
    if "messages" in request:
        turns = [gen.ChatMessage(**message) for message in request["messages"]]
        prompt: dict[str, Any] = {"chat": pb.Chat(messages=turns)}
    else:
        prompt = {"text": request["prompt"]}
    sampling = dict(request["sampling"])
    is_echo = sampling.pop("prompt_logprobs", None) is not None
    return await gateway.ask(name, **prompt, sampling=sampling, echo=is_echo)


async def wait_idle(gateway: GatewayStream) -> pb.Load:
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while True:
            load = await load_now(gateway)
            if load.num_running_reqs == load.num_newcomers == 0:
                return load
            await asyncio.sleep(0.02)


async def load_now(gateway: GatewayStream) -> pb.Load:
    return (await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())).load


async def read_metrics(executor: ExecutorProcess) -> dict[str, float]:
    """Return the sum of each metric's samples."""
    async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S) as http:
        metrics = await http.get(f"http://127.0.0.1:{executor.metrics_port}/metrics")
    return defaultdict(float, sums_by_name(metrics.text))


async def until_load(gateway: GatewayStream, holds: Callable[[pb.Load], bool]) -> None:
    """Wait until the newest load that the executor told is as expected."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while not holds(gateway.load):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("name", list(STREAM))
async def test_tokens_are_those_of_stock_vllm(
    stock: StockAnswers, gateway: GatewayStream, name: str
) -> None:
    answer = await ask_as_stock(gateway, name)

    assert answer.ids == stock[name]["ids"]
    assert answer.text == stock[name]["text"]
    assert answer.num_prompt_tokens == stock[name]["num_prompt_tokens"]
    assert answer.finish_reason == stock[name]["finish_reason"].upper()


async def test_probabilities_are_those_of_stock_vllm(
    stock: StockAnswers, gateway: GatewayStream
) -> None:
    answer = await ask_as_stock(gateway, "likely")

    scored = [token.logprobs for token in answer.tokens]
    assert places(scored) == [near(place) for place in stock["likely"]["logprobs"]]
    assert [place.chosen.id for place in scored] == answer.ids
    assert {len(place.top) for place in scored} == {3}
    for place in scored:
        assert [one.logprob for one in place.top] == sorted(
            (one.logprob for one in place.top), reverse=True
        )


async def test_a_prompt_comes_back_with_its_probabilities(
    stock: StockAnswers, gateway: GatewayStream
) -> None:
    answer = await ask_as_stock(gateway, "echo")

    assert answer.prompt is not None
    assert answer.prompt.text == PROMPT
    first, *rest = answer.prompt.logprobs
    assert not first.chosen.HasField("logprob")
    assert first.chosen.token == ""  # the tokeniser put it there
    assert places(rest) == [near(place) for place in stock["echo"]["prompt_logprobs"][1:]]
    assert "".join(place.chosen.token for place in rest) == PROMPT
    assert len(answer.tokens) == 4


async def test_a_prompt_of_token_ids_comes_back_as_text(gateway: GatewayStream) -> None:
    ids = (await gateway.stub.Tokenize(pb.TokenizeRequest(model=MODEL, text=PROMPT))).ids
    answer = await gateway.ask("ids", token_ids=gen.TokenIds(ids=ids[1:]), echo=True)

    assert answer.prompt == gen.EchoedPrompt(text=PROMPT)


async def test_a_prompt_s_ids_are_those_that_it_has_as_a_request(gateway: GatewayStream) -> None:
    chat = pb.Chat(messages=[gen.ChatMessage(role="user", content=PROMPT)])
    for name, prompt in (("text", {"text": PROMPT}), ("chat", {"chat": chat})):
        ids = (await gateway.stub.Tokenize(pb.TokenizeRequest(model=MODEL, **prompt))).ids
        sampling = {"max_tokens": 2}
        answer = await gateway.ask(name, **prompt, sampling=sampling, returns_prompt_ids=True)

        assert answer.num_prompt_tokens == len(ids)
        assert answer.prompt == gen.EchoedPrompt(token_ids=ids)


async def test_answers_to_one_prompt_are_those_of_requests_of_their_own(
    gateway: GatewayStream,
) -> None:
    sampling = {"temperature": 1, "max_tokens": 12}
    seeds = {"first": 5, "second": 6, "third": -1}
    further = [pb.FurtherAnswer(request_id=name, seed=seeds[name]) for name in ("second", "third")]

    await gateway.ask(
        "first", text=PROMPT, sampling=sampling | {"seed": 5}, further_answers=further
    )
    together = [gateway.answers[name] for name in seeds]
    for answer in together:
        await gateway.wait(answer.done)
    alone = [
        await gateway.ask(f"{name} alone", text=PROMPT, sampling=sampling | {"seed": seed})
        for name, seed in seeds.items()
    ]

    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert len({tuple(answer.ids) for answer in alone}) == 3


async def test_the_seed_that_vllm_takes_for_none_is_a_seed(gateway: GatewayStream) -> None:
    sampling = {"temperature": 2, "seed": -1, "max_tokens": 24}
    answers = [await gateway.ask(f"r{k}", text=PROMPT, sampling=sampling) for k in range(2)]

    assert answers[0].ids == answers[1].ids


FORMS: dict[str, tuple[gen.StructuredOutputs, Callable[[str], object]]] = {
    "schema": (
        gen.StructuredOutputs(json_schema='{"enum": ["red", 42, null]}'),
        lambda text: json.loads(text) in ("red", 42, None),
    ),
    "parts": (  # between which JSON allows white space without end, and this model writes it
        gen.StructuredOutputs(
            json_schema='{"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3}'
        ),
        lambda text: len(json.loads(text)) == 3 and "  " not in text,
    ),
    "regex": (
        gen.StructuredOutputs(regex="(ab){3}c"),
        lambda text: text == "abababc",
    ),
    "choice": (
        gen.StructuredOutputs(choice=gen.Choices(texts=["yes", "no"])),
        lambda text: text in ("yes", "no"),
    ),
    "grammar": (
        gen.StructuredOutputs(grammar='root ::= "x" | "y"'),
        lambda text: text in ("x", "y"),
    ),
}


@pytest.mark.parametrize("name", FORMS)
async def test_an_answer_keeps_to_its_form(gateway: GatewayStream, name: str) -> None:
    form, holds = FORMS[name]
    sampling = gen.SamplingParams(temperature=1, seed=1, max_tokens=200, structured_outputs=form)
    answer = await gateway.ask(name, text=PROMPT, sampling=sampling)

    assert answer.finish_reason == "STOP"
    assert holds(answer.text), answer.text


async def test_an_untrained_model_writes_json_when_it_must(gateway: GatewayStream) -> None:
    form = gen.StructuredOutputs(json_object=True)
    sampling = gen.SamplingParams(temperature=1, seed=2, max_tokens=400, structured_outputs=form)
    answer = await gateway.ask("object", text=PROMPT, sampling=sampling)

    assert answer.text.lstrip().startswith("{")
    if answer.finish_reason == "STOP":
        assert isinstance(json.loads(answer.text), dict)


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (gen.StructuredOutputs(json_schema='{"type": "no such type"}'), "response_format"),
        (gen.StructuredOutputs(json_schema="{"), "response_format"),
        (gen.StructuredOutputs(json_schema="[" * 500), "response_format"),
        (gen.StructuredOutputs(json_schema='{"$ref": "#/nowhere"}'), "response_format"),
        (gen.StructuredOutputs(regex="("), "structured_outputs.regex"),
        (gen.StructuredOutputs(grammar="root ::= nowhere"), "structured_outputs.grammar"),
        # These pass for grammars, and no answer can have them.
        (gen.StructuredOutputs(grammar="root ::= root"), "structured_outputs.grammar"),
        (gen.StructuredOutputs(json_schema='{"$ref": "#"}'), "response_format"),
        (
            gen.StructuredOutputs(json_schema='{"type": "object", "patternProperties": {"(": {}}}'),
            "response_format",
        ),
        # Taken by another library than the one that the engine uses.
        (
            gen.StructuredOutputs(json_schema='{"type": "number", "multipleOf": 3}'),
            "response_format",
        ),
    ],
)
async def test_a_form_that_makes_no_sense_is_refused(
    gateway: GatewayStream, form: gen.StructuredOutputs, field: str
) -> None:
    sampling = gen.SamplingParams(structured_outputs=form, max_tokens=4)
    answer = await gateway.ask("bad", text=PROMPT, sampling=sampling)

    assert answer.reject_code == "INVALID_ARGUMENT"
    assert answer.rejected is not None
    assert answer.rejected.field == field


async def test_a_form_that_ends_nowhere_fails_its_request_alone(gateway: GatewayStream) -> None:
    form = gen.StructuredOutputs(grammar='root ::= "a" b\nb ::= b "x"')
    other = await gateway.submit("other", text=PROMPT, sampling=GREEDY)
    answer = await gateway.ask("dead", text=PROMPT, sampling={"structured_outputs": form})
    await gateway.wait(other.done)

    assert answer.ending is not None
    assert answer.ending.WhichOneof("how") == "failure"
    assert not answer.ending.failure.retryable
    assert other.finish_reason == "LENGTH"


UNITS = '{"type": "object", "properties": {"u": {"enum": ["C", "F"]}}, "required": ["u"]}'
TOOLS = [gen.Tool(name="weather", description="Tell it.", parameters=UNITS), gen.Tool(name="noop")]


async def ask_with_tools(gateway: GatewayStream, name: str, **options: Any) -> Answer:
    chat = pb.Chat(
        messages=[gen.ChatMessage(role="user", content="Rain?")],
        options=gen.ConversationOptions(tools=TOOLS, **options),
    )
    sampling = {"temperature": 1, "seed": 3, "max_tokens": 400}
    return await gateway.ask(name, chat=chat, sampling=sampling)


def calls_of(answer: Answer) -> list[tuple[str, Any]]:
    calls: dict[int, gen.ToolCallPart] = {}
    for part in (part for token in answer.tokens for part in token.tool_calls):
        call = calls.setdefault(part.index, gen.ToolCallPart(id=part.id, name=part.name))
        call.arguments += part.arguments
    assert all(call.id for call in calls.values())
    return [(call.name, json.loads(call.arguments)) for call in calls.values()]


async def test_a_named_function_is_called_without_a_parser(gateway: GatewayStream) -> None:
    answer = await ask_with_tools(
        gateway, "named", tool_choice=gen.TOOL_CHOICE_NAMED, named_tool="weather"
    )

    ((name, arguments),) = calls_of(answer)
    assert (name, answer.text) == ("weather", "")
    assert arguments["u"] in ("C", "F")
    assert answer.finish_reason == "STOP"


async def test_a_required_call_is_made_without_a_parser(gateway: GatewayStream) -> None:
    answer = await ask_with_tools(
        gateway, "required", tool_choice=gen.TOOL_CHOICE_REQUIRED, forbids_parallel_calls=True
    )

    ((name, arguments),) = calls_of(answer)
    assert name in ("weather", "noop")
    assert isinstance(arguments, dict)
    assert (answer.text, answer.finish_reason) == ("", "TOOL_CALLS")


async def test_what_is_not_kept_to_is_named_with_its_place(gateway: GatewayStream) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)."}}}'
    form = gen.StructuredOutputs(json_schema=schema)
    unkept = await gateway.ask("unkept", text=PROMPT, sampling={"structured_outputs": form})
    chat = pb.Chat(
        messages=[gen.ChatMessage(role="user", content="Rain?")],
        options=gen.ConversationOptions(
            tools=[gen.Tool(name="weather", parameters=schema)],
            tool_choice=gen.TOOL_CHOICE_REQUIRED,
        ),
    )
    call = await gateway.ask("unkept call", chat=chat)
    no_schema = gen.StructuredOutputs(json_schema='{"type": "no such type"}')
    unknown = await gateway.ask("unknown", text=PROMPT, sampling={"structured_outputs": no_schema})

    assert [answer.rejected and answer.rejected.message for answer in (unkept, call, unknown)] == [
        "response_format: properties.a.pattern: a lookahead is not kept to",
        "tools: weather.properties.a.pattern: a lookahead is not kept to",
        'response_format: Unsupported type "no such type"',
    ]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": TOOLS}, "tool_choice"),  # as the model likes: there is no parser
        ({"tools": [gen.Tool(name="a b")]}, "tools[0].name"),
        (
            {
                "tools": [gen.Tool(name="f", parameters='{"$ref": "#"}')],
                "tool_choice": gen.TOOL_CHOICE_NAMED,
                "named_tool": "f",
            },
            "tools",
        ),
        ({"template_variables": '{"no_such_variable": 1}'}, "chat_template_kwargs"),
    ],
)
async def test_options_that_cannot_be_followed_are_refused(
    gateway: GatewayStream, options: dict[str, Any], field: str
) -> None:
    chat = pb.Chat(
        messages=[gen.ChatMessage(role="user", content="Hi")],
        options=gen.ConversationOptions(**options),
    )
    answer = await gateway.ask("bad", chat=chat)

    assert answer.reject_code == "INVALID_ARGUMENT"
    assert answer.rejected is not None
    assert answer.rejected.field == field


async def test_a_template_shows_tools_calls_results_and_effort(gateway: GatewayStream) -> None:
    call = gen.ToolCall(id="c", name="weather", arguments='{"u": "C"}')
    chat = pb.Chat(
        messages=[
            gen.ChatMessage(role="user", content="Rain?"),
            gen.ChatMessage(role="assistant", tool_calls=[call]),
            gen.ChatMessage(role="tool", tool_call_id="c", content="dry"),
        ],
        options=gen.ConversationOptions(
            tools=TOOLS[1:], tool_choice=gen.TOOL_CHOICE_NONE, reasoning_effort="low"
        ),
    )
    tokens = await gateway.stub.Tokenize(pb.TokenizeRequest(model=MODEL, chat=chat))
    text = await gateway.stub.Detokenize(pb.DetokenizeRequest(model=MODEL, ids=tokens.ids))
    answer = await gateway.ask("shown", chat=chat, sampling={"max_tokens": 1})

    assert text.text == (
        '<|begin|><|system|>Function {"name": "noop", "parameters": null}. <|end|>'
        '<|user|>Rain?<|end|><|assistant|> Call c: weather{"u": "C"}<|end|>'
        "<|user|>Result of c: dry<|end|><|assistant|>Effort: low. "
    )
    assert answer.num_prompt_tokens == len(tokens.ids)


async def test_text_becomes_tokens_and_text_again(gateway: GatewayStream) -> None:
    request = pb.TokenizeRequest(model=MODEL, text=PROMPT, with_texts=True)
    tokens = await gateway.stub.Tokenize(request)
    request.omits_special_tokens = True
    bare = await gateway.stub.Tokenize(request)
    back = await gateway.stub.Detokenize(pb.DetokenizeRequest(model=MODEL, ids=bare.ids))
    answer = await gateway.ask("text", text=PROMPT)

    assert list(tokens.ids[1:]) == list(bare.ids)  # the first one begins every text
    assert len(tokens.ids) == len(tokens.texts) == answer.num_prompt_tokens
    assert tokens.max_model_len == MAX_MODEL_LEN
    assert back.text == PROMPT


async def test_a_conversation_becomes_the_tokens_of_its_prompt(gateway: GatewayStream) -> None:
    chat = pb.Chat(messages=[gen.ChatMessage(role="user", content="What is a lambda?")])
    request = pb.TokenizeRequest(model=MODEL, chat=chat)
    tokens = await gateway.stub.Tokenize(request)
    request.omits_generation_prompt = True
    open_ended = await gateway.stub.Tokenize(request)
    answer = await gateway.ask("chat", chat=chat, sampling=GREEDY)

    assert len(tokens.ids) == answer.num_prompt_tokens
    assert len(open_ended.ids) < len(tokens.ids)
    assert list(open_ended.ids) == list(tokens.ids[: len(open_ended.ids)])


async def test_a_text_longer_than_the_context_is_tokenised(gateway: GatewayStream) -> None:
    request = pb.TokenizeRequest(model=MODEL, text="word " * 2 * MAX_MODEL_LEN)

    assert len((await gateway.stub.Tokenize(request)).ids) > MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("call", "request_", "code"),
    [
        ("Tokenize", pb.TokenizeRequest(model=MODEL), "INVALID_ARGUMENT"),
        ("Tokenize", pb.TokenizeRequest(model=MODEL, chat=pb.Chat()), "INVALID_ARGUMENT"),
        ("Tokenize", pb.TokenizeRequest(model="other", text="x"), "NOT_FOUND"),
        ("Detokenize", pb.DetokenizeRequest(model=MODEL, ids=[999_999]), "INVALID_ARGUMENT"),
        ("Detokenize", pb.DetokenizeRequest(model=MODEL, ids=[-1]), "INVALID_ARGUMENT"),
        ("Detokenize", pb.DetokenizeRequest(model="other", ids=[1]), "NOT_FOUND"),
    ],
)
async def test_what_has_no_tokens_is_refused(
    gateway: GatewayStream, call: str, request_: Any, code: str
) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        await getattr(gateway.stub, call)(request_)

    assert refused.value.code().name == code


async def test_greedy_tokens_stay_the_same_in_a_mixed_batch(
    stock: StockAnswers, gateway: GatewayStream
) -> None:
    answers = await asyncio.gather(*(ask_as_stock(gateway, name) for name in STREAM))

    for name, answer in zip(STREAM, answers, strict=True):
        if name.startswith("greedy"):
            assert answer.ids == stock[name]["ids"]


async def test_the_chat_template_is_applied(gateway: GatewayStream) -> None:
    chat = await gateway.ask("chat", chat="What is a lambda?", sampling=GREEDY)
    rendered = "<|user|>What is a lambda?<|end|><|assistant|>"  # begin is put before every text
    text = await gateway.ask("text", text=rendered, sampling=GREEDY)

    assert chat.num_prompt_tokens == text.num_prompt_tokens
    assert chat.ids == text.ids


async def test_a_held_request_waits_with_its_deposit_and_goes_on_where_it_was(
    gateway: GatewayStream,
) -> None:
    """Its reader takes whatever is generated at once, but for the time of the hold."""
    options = {"text": PROMPT * 8, "service_level": gen.ServiceLevel(consumption_rate_tps=1e6)}
    answer = await gateway.submit("held", sampling=LONG, **options)
    await gateway.wait(answer.started)
    await gateway.hold("held")
    before = await gateway.observed("held", pb.REQUEST_STATE_PAUSED)
    await gateway.ask("other", text=PROMPT * 8, sampling={"temperature": 0, "max_tokens": 32})
    after = await gateway.observed("held", pb.REQUEST_STATE_PAUSED)

    # A step that was under way when the hold came may bring one more token.
    assert 0 < before.num_generated_tokens <= after.num_generated_tokens
    assert after.num_generated_tokens <= before.num_generated_tokens + 1 < LONG["max_tokens"]
    assert after.num_deposited_tokens == after.num_generated_tokens  # nothing was delivered
    await gateway.hold("held", held=False)
    num_tokens = min(after.num_generated_tokens + 100, LONG["max_tokens"])
    await gateway.has_tokens(answer, num_tokens)
    await gateway.abort(answer, "held")
    sampling = {"temperature": 0, "max_tokens": num_tokens}
    expected = await gateway.ask("never-held", sampling=sampling, **options)
    assert answer.ids[:num_tokens] == expected.ids


async def test_token_ids_are_taken_as_they_are(gateway: GatewayStream) -> None:
    ids = gen.TokenIds(ids=[0, 300, 301, 302])
    answer = await gateway.ask("ids", token_ids=ids, sampling=GREEDY)

    assert answer.num_prompt_tokens == 4
    assert len(answer.ids) == GREEDY["max_tokens"]


async def test_all_requests_of_a_step_come_in_one_frame(gateway: GatewayStream) -> None:
    """However far apart they arrive: from its first token on, a request is in every frame."""
    names = [f"r{i}" for i in range(MAX_NUM_SEQS)]
    for name in names:
        sampling = {"temperature": 0, "max_tokens": 300}
        await gateway.submit(name, text=PROMPT, sampling=sampling)
    for name in names:
        await gateway.wait(gateway.answers[name].done)

    steps = [{output.request_id for output in frame.outputs} for frame in gateway.frames]
    steps = [step for step in steps if step]
    for name in names:
        present = [number for number, step in enumerate(steps) if name in step]
        assert present == list(range(present[0], present[-1] + 1))
    assert max(len(step) for step in steps) > 1
    assert {tuple(gateway.answers[name].ids) for name in names} == {
        tuple(gateway.answers["r0"].ids)
    }


async def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(
    gateway: GatewayStream,
) -> None:
    whole = await gateway.ask("whole", text=PROMPT, sampling=GREEDY)
    stop = whole.text[30:34]
    cut = await gateway.ask("cut", text=PROMPT, sampling={**GREEDY, "stop": [stop]})

    assert cut.finish_reason == "STOP"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.ids == whole.ids[: len(cut.ids)]


async def test_sampled_bytes_never_make_invalid_text(gateway: GatewayStream) -> None:
    sampling = {"temperature": 2, "seed": 3, "max_tokens": 400}
    answer = await gateway.ask("hot", text=PROMPT, sampling=sampling)

    # A hot untrained model draws single bytes of the vocabulary: some complete no character.
    assert any(not token.text for token in answer.tokens[:-1])
    assert len(answer.ids) == 400 or answer.finish_reason == "STOP"


async def test_unset_max_tokens_is_16_for_text_and_the_rest_of_the_context_for_chat(
    gateway: GatewayStream,
) -> None:
    text = await gateway.ask("text", text=PROMPT, sampling={"temperature": 0})
    long_turn = "word " * (MAX_MODEL_LEN // 2 - 64)  # a word is two tokens
    chat = await gateway.ask("chat", chat=long_turn, sampling={"temperature": 0})

    assert (len(text.ids), text.finish_reason) == (16, "LENGTH")
    assert chat.num_prompt_tokens is not None
    assert chat.num_prompt_tokens + len(chat.ids) == MAX_MODEL_LEN
    assert chat.finish_reason == "LENGTH"


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"text": "hi", "model": "gpt"}, "UNKNOWN_MODEL", "model"),
        ({"text": "hi", "sampling": {"top_p": 2}}, "INVALID_ARGUMENT", "top_p"),
        ({"text": "hi", "sampling": {"logprobs": 21}}, "INVALID_ARGUMENT", "logprobs"),
        ({"text": "hi", "sampling": {"min_tokens": 17}}, "INVALID_ARGUMENT", "min_tokens"),
        (
            {"text": "hi", "sampling": {"stop_token_ids": [999_999]}},
            "INVALID_ARGUMENT",
            "stop_token_ids",
        ),
        (
            {"text": "hi", "sampling": {"logit_bias": {999_999: 1}}},
            "INVALID_ARGUMENT",
            "logit_bias",
        ),
        ({"text": "hi", "priority": 1}, "INVALID_ARGUMENT", "priority"),
        ({"chat": "hi", "echo": True}, "INVALID_ARGUMENT", "echo"),
        ({"token_ids": gen.TokenIds(ids=[999_999])}, "INVALID_ARGUMENT", "prompt"),
        ({"token_ids": gen.TokenIds(ids=[-1])}, "INVALID_ARGUMENT", "prompt"),
        ({"text": "word " * MAX_MODEL_LEN}, "CONTEXT_LENGTH", "prompt"),
        ({"text": "word " * 200_000}, "CONTEXT_LENGTH", "prompt"),
        ({"chat": "word " * MAX_MODEL_LEN}, "CONTEXT_LENGTH", "messages"),
        ({"token_ids": gen.TokenIds(ids=[300] * MAX_MODEL_LEN)}, "CONTEXT_LENGTH", "prompt"),
    ],
)
async def test_what_cannot_be_served_is_refused(
    gateway: GatewayStream, fields: dict[str, Any], code: str, field: str
) -> None:
    answer = await gateway.ask("bad", **fields)

    assert answer.reject_code == code
    assert answer.rejected is not None
    assert answer.rejected.field == field
    assert answer.rejected.message


async def test_a_conversation_that_cannot_fit_is_refused_before_anything_is_done_for_it(
    gateway: GatewayStream,
) -> None:
    """Its own characters are named, not the template's too, and what else is wrong is not seen."""
    turns = [gen.ChatMessage(role="user", content="x" * 900_000)]
    options = gen.ConversationOptions(template_variables='{"no_such": 1}')
    answer = await gateway.ask("long", chat=pb.Chat(messages=turns, options=options))
    counted = await gateway.stub.Tokenize(
        pb.TokenizeRequest(model=MODEL, chat=pb.Chat(messages=turns))
    )

    assert answer.reject_code == "CONTEXT_LENGTH"
    assert answer.rejected is not None
    assert "contains 900000 characters" in answer.rejected.message
    assert answer.rejected.overflow.num_prompt_tokens == 0
    assert answer.rejected.overflow.max_model_len == MAX_MODEL_LEN
    assert len(counted.ids) > MAX_MODEL_LEN


async def test_a_live_id_is_refused_and_its_request_goes_on(gateway: GatewayStream) -> None:
    answer = await gateway.submit("twice", text=PROMPT, sampling=LONG)
    await gateway.ask("twice", text=PROMPT, sampling=LONG)
    assert answer.reject_code == "DUPLICATE"

    answer.done.clear()
    await gateway.has_tokens(answer, len(answer.ids) + 20)
    await gateway.abort(answer, "twice")
    assert len(answer.ids) < LONG["max_tokens"]


async def test_abort_ends_one_request_and_no_other(gateway: GatewayStream) -> None:
    aborted = await gateway.submit("aborted", text=PROMPT, sampling=LONG)
    other = await gateway.submit("other", text=PROMPT, sampling={**LONG, "max_tokens": 100})
    await gateway.wait(aborted.started)
    await gateway.send(abort=pb.Abort(request_id="aborted"))
    await gateway.send(abort=pb.Abort(request_id="never-seen"))
    await gateway.wait(aborted.done)
    await gateway.wait(other.done)

    assert aborted.finish_reason == "CANCELLED"
    assert len(aborted.ids) < LONG["max_tokens"]
    assert other.finish_reason == "LENGTH"
    await wait_idle(gateway)


async def test_a_dropped_stream_leaves_nothing_in_the_engine(
    executor: ExecutorProcess, gateway: GatewayStream
) -> None:
    async with GatewayStream(executor.address, gateway_id="gateway-dying") as dying:
        for i in range(4):
            answer = await dying.submit(f"r{i}", text=PROMPT, sampling=LONG)
            await dying.wait(answer.started)
        load = await load_now(gateway)
        assert load.num_running_reqs == 4
        assert load.kv_unavailable_frac > 0
        # Of another gateway's requests, of which this one has none.
        await until_load(
            gateway, lambda load: load.num_running_reqs == 4 and not load.num_newcomers
        )
        assert gateway.load.prefill_tps > 0
        assert 0 < gateway.load.kv_unavailable_frac < 1
        dying.drop()
        num_tokens = len(dying.answers["r0"].ids)

    load = await wait_idle(gateway)
    assert num_tokens < LONG["max_tokens"]
    assert load == pb.Load(prefill_tps=load.prefill_tps)
    await until_load(gateway, lambda load: load == pb.Load(prefill_tps=load.prefill_tps))


async def test_gateways_hear_what_paced_readers_have_and_take(gateway: GatewayStream) -> None:
    level = gen.ServiceLevel(consumption_rate_tps=2.0)
    answer = await gateway.submit("paced", text=PROMPT, sampling=LONG, service_level=level)
    await gateway.wait(answer.started)
    await until_load(gateway, lambda load: load.deposit_s > 5)
    # The engine makes far more than 2 tokens a second, and the reader has taken none.
    assert 0 < gateway.load.reading_load_frac < 0.5
    await gateway.abort(answer, "paced")
    await until_load(gateway, lambda load: load.deposit_s == load.reading_load_frac == 0)


async def test_deposited_tokens_are_generated_minus_delivered(
    executor: ExecutorProcess, gateway: GatewayStream
) -> None:
    async def num_deposited() -> float:
        return (await read_metrics(executor))["evenflow_executor_deposited_tokens"]

    answer = await gateway.submit("paced", text=PROMPT, sampling=LONG)
    await gateway.wait(answer.started)
    counts = [pb.DeliveredCount(request_id="paced", num_delivered_tokens=1)]
    await gateway.send(delivered=pb.Delivered(counts=counts))
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while (seen := await num_deposited()) < 20:
            assert not answer.done.is_set()
            await asyncio.sleep(0.02)

    # Everything counted as generated is on its way already; one of it was delivered.
    await gateway.abort(answer, "paced")
    assert seen <= len(answer.ids) - 1
    assert await num_deposited() == 0


async def test_answers_come_also_after_the_gateway_has_said_its_last(
    gateway: GatewayStream,
) -> None:
    answer = await gateway.submit("last", text=PROMPT, sampling=GREEDY)
    await gateway.end_input()
    await gateway.wait(answer.done)
    await asyncio.wait_for(gateway.reader, timeout=ANSWER_TIMEOUT_S)

    assert answer.finish_reason == "LENGTH"


@pytest.mark.parametrize(
    "messages",
    [
        [{"abort": pb.Abort(request_id="r")}],
        [{"hello": pb.Hello()}],
        [{"hello": pb.Hello(gateway_id="g")}, {"hello": pb.Hello(gateway_id="g")}],
        [{"hello": pb.Hello(gateway_id="g")}, {}],
    ],
)
async def test_a_stream_of_another_shape_is_ended(
    gateway: GatewayStream, messages: list[dict[str, Any]]
) -> None:
    call = gateway.stub.Stream(iter([pb.StreamRequest(**message) for message in messages]))
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_model_is_described(gateway: GatewayStream) -> None:
    info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())

    assert (info.executor_id, info.model) == (socket.gethostname(), MODEL)
    assert (info.max_model_len, info.max_num_seqs) == (MAX_MODEL_LEN, MAX_NUM_SEQS)
    assert (info.num_layers, info.num_kv_heads, info.head_dim) == (8, 2, 32)
    assert (info.tensor_parallel_size, info.pipeline_parallel_size) == (1, 1)
    assert info.layers_per_group == info.num_layers
    assert info.dtype == "float32"
    # A block holds keys and values of every layer: 8 layers * 2 * 2 heads * 32 * 4 bytes a token.
    block_bytes = info.block_size * 8 * 2 * 2 * 32 * 4
    assert info.num_gpu_blocks == (256 << 20) // block_bytes


ORPHANS = "evenflow_executor_orphaned_requests_total"  # of a bug, or of a test (`test_accounts.py`)


async def test_vllms_metrics_are_served_and_each_of_ours_moves(executor: ExecutorProcess) -> None:
    """One without a scene here is never seen to move: write the scene, or delete the metric."""

    async def once_idle() -> dict[str, float]:
        while (values := await read_metrics(executor))["evenflow_executor_gateway_streams"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return values

    before = await once_idle()
    async with GatewayStream(executor.address) as gateway:
        level = gen.ServiceLevel(consumption_rate_tps=0.001)
        answer = await gateway.submit("counted", text=PROMPT, sampling=LONG, service_level=level)
        await gateway.has_tokens(answer, 3)
        meanwhile = await read_metrics(executor)
        await gateway.abort(answer, "counted")
        resume = pb.Resume(output_ids=answer.ids[:2], max_tokens=4)
        await gateway.ask("goes on", text=PROMPT, sampling=LONG, resume=resume)
    after = await once_idle()

    ours = {name for name in after if name.startswith("evenflow_executor_")}
    ours = {name for name in ours if not name.endswith(("_bucket", "_created"))}
    sums = {name for name in ours if name.endswith(("_total", "_sum", "_count"))}
    moved = {name for name in sums if after[name] > before[name]}
    moved |= {name for name in ours - sums if meanwhile[name] > before[name] == after[name]}
    assert ours - moved == {ORPHANS}
    assert after["vllm:generation_tokens_total"] > before["vllm:generation_tokens_total"]


async def observe(
    gateway: GatewayStream, holds: Callable[[pb.WatchRequestsResponse], bool]
) -> pb.WatchRequestsResponse:
    """Watch until `holds` is true of an update."""
    async for update in gateway.updates():
        if holds(update):
            return update
    raise AssertionError("the watch ended")


async def test_the_scheduler_sees_the_deposit_of_a_slow_reader(gateway: GatewayStream) -> None:
    level = gen.ServiceLevel(consumption_rate_tps=0.001)  # the second token is due in 1,000 s
    answer = await gateway.submit("slow", text=PROMPT, sampling=LONG, service_level=level)
    await gateway.wait(answer.started)
    counts = [
        pb.DeliveredCount(request_id="slow", num_delivered_tokens=1),
        pb.DeliveredCount(request_id="nobody", num_delivered_tokens=9),
    ]
    await gateway.send(delivered=pb.Delivered(counts=counts))

    def has_delivered(num_tokens: int) -> Callable[[pb.WatchRequestsResponse], bool]:
        # Five can be delivered next.
        return lambda u: (
            [r.num_delivered_tokens for r in u.requests if r.num_generated_tokens >= 5]
            == [num_tokens]
        )

    update = await observe(gateway, has_delivered(1))
    (request,) = update.requests
    assert request.request_id == "slow"
    assert request.state == pb.REQUEST_STATE_DECODING
    assert request.release_interval_s == 1000
    assert request.num_deposited_tokens == request.num_generated_tokens - 1
    assert update.observed_step_s > 0

    counts = [pb.DeliveredCount(request_id="slow", num_delivered_tokens=5)]
    await gateway.send(delivered=pb.Delivered(counts=counts))
    update = await observe(gateway, has_delivered(5))
    (request,) = update.requests
    assert request.num_deposited_tokens == request.num_generated_tokens - 5
    await gateway.send(abort=pb.Abort(request_id="slow"))
    await observe(gateway, lambda u: not u.requests)


async def test_a_gateway_that_comes_back_finds_nothing_of_its_readers(
    executor: ExecutorProcess,
) -> None:
    async with GatewayStream(executor.address) as gateway:
        answer = await gateway.submit("r", text=PROMPT, sampling=LONG)
        await gateway.wait(answer.started)
    async with GatewayStream(executor.address) as gateway:
        counts = [pb.DeliveredCount(request_id="r", num_delivered_tokens=3)]
        await gateway.send(delivered=pb.Delivered(counts=counts))

        await observe(gateway, lambda u: not u.requests)
        assert (await gateway.ask("r", text=PROMPT, sampling=GREEDY)).finish_reason == "LENGTH"


async def test_a_watch_at_an_impossible_rate_is_refused(gateway: GatewayStream) -> None:
    watch = gateway.stub.WatchRequests(pb.WatchRequestsRequest(max_updates_per_s=1000))

    with pytest.raises(aio.AioRpcError) as refused:
        await anext(aiter(watch))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
