"""A real executor whose model marks its thoughts and has an adapter, with a pool of one context."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.adapters import save_adapter
from lab.executor_client import ANSWER_TIMEOUT_S, MODEL, Answer, GatewayStream
from lab.stack.executor_process import ExecutorProcess
from lab.stack.processes import EXIT_TIMEOUT_S, assert_gone
from lab.thinking_model import END_OF_THOUGHT, save_thinking_model
from tests.executors.ahead import num_computed_ahead
from tests.executors.continuing import assert_goes_on
from tests.gateways import gateway_for
from tests.sent_again import Body, again, behind, events_of, ids_in, with_ids
from tests.stock_requests import PROMPT

pytestmark = pytest.mark.timeout(3_600)

NOW = {END_OF_THOUGHT: 100.0}  # makes the end of the thoughts the next token, if it is allowed
SOON = {END_OF_THOUGHT: 7.0}
NEVER = {END_OF_THOUGHT: -100.0}
BRIEF = {"temperature": 0, "max_tokens": 16}
ADAPTER = "tuned"
BLOCK_SIZE = 32
NUM_TOKENS = 2_048  # that the pool holds


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorProcess]:
    directory = tmp_path_factory.mktemp("executor")
    adapter = directory / ADAPTER
    adapter.mkdir()
    save_adapter(adapter)
    process = ExecutorProcess(
        directory / "executor.log",
        MODEL=save_thinking_model(directory / MODEL),
        REASONING_PARSER="deepseek_r1",
        LORA_MODULES=json.dumps({ADAPTER: str(adapter)}),
        MAX_MODEL_LEN=NUM_TOKENS,
        BLOCK_SIZE=BLOCK_SIZE,
        NUM_GPU_BLOCKS_OVERRIDE=NUM_TOKENS // BLOCK_SIZE + 1,  # one is vLLM's own
    )
    with process.serving():
        yield process


async def ask(gateway: GatewayStream, name: str, bias: dict[int, float], **fields: Any) -> Answer:
    return await gateway.ask(name, **conversation(bias, **fields))


def conversation(bias: dict[int, float], **fields: Any) -> dict[str, Any]:
    options = {key: fields.pop(key) for key in list(fields) if key in OPTIONS}
    chat = pb.Chat(
        messages=[gen.ChatMessage(role="user", content="Rain?")],
        options=gen.ConversationOptions(**options),
    )
    sampling = gen.SamplingParams(temperature=1, max_tokens=200, logit_bias=bias, **fields)
    return {"chat": chat, "sampling": sampling}


OPTIONS = {field.name for field in gen.ConversationOptions.DESCRIPTOR.fields}
CHOICE = gen.StructuredOutputs(choice=gen.Choices(texts=["yes", "no"]))


def thoughts_of(answer: Answer) -> str:
    return "".join(token.reasoning for token in answer.tokens)


async def test_thoughts_without_an_end_are_all_that_is_said(gateway: GatewayStream) -> None:
    answer = await ask(gateway, "endless", NEVER, seed=1)
    silent = await ask(gateway, "silent", NEVER, seed=1, omits_reasoning=True, logprobs=1)

    assert answer.text == silent.text == thoughts_of(silent) == ""
    assert thoughts_of(answer)
    assert silent.ids == answer.ids
    assert not any(token.HasField("logprobs") for token in silent.tokens)


async def test_text_is_read_and_thoughts_and_forms_are_not(gateway: GatewayStream) -> None:
    """With two answers at least that have both thoughts and text."""
    asked = [
        {"seed": 0},
        {"seed": 1},
        {"seed": 2, "omits_reasoning": True},
        {"seed": 3, "omits_reasoning": True},
    ]
    answers = [await ask(gateway, f"r{one['seed']}", SOON, **one) for one in asked]
    formed = await ask(gateway, "formed", NOW, structured_outputs=CHOICE)

    read = [[not token.not_read for token in answer.tokens] for answer in answers]
    assert sum(len(set(one)) == 2 for one in read) >= 2
    for answer in answers:
        assert not any(token.not_read for token in answer.tokens if token.text)
        assert all(token.not_read for token in answer.tokens if token.reasoning)
    assert formed.text
    assert all(token.not_read for token in formed.tokens)


async def test_while_a_model_thinks_its_reader_has_nothing_in_hand(gateway: GatewayStream) -> None:
    """At half a token per second all but the first would be, in a text as in a thought."""
    slow = gen.ServiceLevel(consumption_rate_tps=0.5)
    chat = pb.Chat(messages=[gen.ChatMessage(role="user", content="Rain?")])
    sampling = {"temperature": 1, "max_tokens": 1_000, "seed": 1}
    thinks = {"chat": chat, "sampling": gen.SamplingParams(logit_bias=NEVER, **sampling)}
    says = {"text": "Rain?", "sampling": gen.SamplingParams(**sampling, ignore_eos=True)}
    for name, asked, least, most in (("thinks", thinks, 0, 0), ("says", says, 30, 1_000)):
        answer = await gateway.submit(name, service_level=slow, **asked)
        await gateway.has_tokens(answer, 40)
        seen = await gateway.observed(name, pb.REQUEST_STATE_DECODING)
        await gateway.abort(answer, name)

        assert seen.num_generated_tokens >= 40
        assert least <= seen.num_deposited_tokens <= most


async def test_a_request_rests_while_its_reader_has_enough(gateway: GatewayStream) -> None:
    """At a token in 20 s each is 20 s in hand: some thirty are the 600 s that are enough."""
    level = gen.ServiceLevel(
        consumption_rate_tps=0.05, release=gen.RELEASE_AT_ONCE, max_in_hand_s=600
    )
    sampling = {"temperature": 0, "max_tokens": 1_000, "ignore_eos": True}
    answer = await gateway.submit("rests", text="Rain?", sampling=sampling, service_level=level)
    seen = await gateway.observed("rests", pb.REQUEST_STATE_PAUSED)
    await gateway.abort(answer, "rests")

    assert 30 <= len(answer.tokens) < 100
    assert seen.why == "in_hand"


async def test_a_gateway_keeps_no_word_back_for_the_thoughts_before_it(
    executor: ExecutorProcess,
) -> None:
    """At half a token per second fifty thoughts would take a hundred seconds."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Rain?"}],
        "stream": True,
        "max_tokens": 1_500,
        "logit_bias": {str(END_OF_THOUGHT): 2.0},
        "evenflow": {"consumption_rate_tps": 0.5},
    }
    num_thoughts = 0
    async with gateway_for(executor) as client:
        await client.wait_ready()
        for seed in range(20):
            asked_s, num_thoughts = time.monotonic(), 0
            url = "/v1/chat/completions"
            async with client.http.stream("POST", url, json=body | {"seed": seed}) as response:
                async for line in response.aiter_lines():
                    num_thoughts += '"reasoning"' in line
                    if '"content":"' in line and '"content":""' not in line:
                        break
                    assert "[DONE]" not in line
            if num_thoughts >= 50:
                break

    assert num_thoughts >= 50
    assert time.monotonic() - asked_s < num_thoughts  # half of what the thoughts would take


async def test_a_form_holds_after_the_thoughts_and_not_before(gateway: GatewayStream) -> None:
    answers = [
        await ask(gateway, f"r{seed}", SOON, seed=seed, structured_outputs=CHOICE)
        for seed in range(4)
    ]

    ended = [answer for answer in answers if END_OF_THOUGHT in answer.ids]
    assert any(thoughts_of(answer) for answer in ended)
    for answer in ended:
        assert (answer.text in ("yes", "no"), answer.finish_reason) == (True, "STOP")


async def test_a_form_holds_after_thoughts_that_are_not_told(gateway: GatewayStream) -> None:
    answer = await ask(gateway, "r", NOW, structured_outputs=CHOICE, omits_reasoning=True)

    assert answer.ids[0] == END_OF_THOUGHT
    assert answer.text in ("yes", "no")
    assert thoughts_of(answer) == ""


async def test_a_required_call_follows_the_thoughts(gateway: GatewayStream) -> None:
    answer = await ask(
        gateway,
        "call",
        NOW,
        seed=1,
        tools=[gen.Tool(name="f", parameters='{"enum": [{"x": 1}]}')],
        tool_choice=gen.TOOL_CHOICE_NAMED,
        named_tool="f",
    )

    parts = [part for token in answer.tokens for part in token.tool_calls]
    assert answer.ids[0] == END_OF_THOUGHT
    assert json.loads("".join(part.arguments for part in parts)) == {"x": 1}
    assert (parts[0].name, answer.text, thoughts_of(answer)) == ("f", "", "")


@pytest.mark.parametrize("ahead", [True, False])
async def test_the_next_turn_finds_its_answer_where_it_was_computed_ahead(
    executor: ExecutorProcess, gateway: GatewayStream, ahead: bool
) -> None:
    """The template leaves thoughts out, so that the next prompt parts with the answer there."""
    before = await num_computed_ahead(executor)
    asked = await with_thoughts_and_text(gateway)
    hint = gen.RetentionHint(next_prefix=ahead)
    first = await gateway.ask("first", **asked, retention=hint, cache_salt=str(ahead))
    while ahead and await num_computed_ahead(executor) == before:  # noqa: ASYNC110
        await asyncio.sleep(0.05)

    chat = asked["chat"]
    chat.messages.append(gen.ChatMessage(role="assistant", content=first.text))
    chat.messages.append(gen.ChatMessage(role="user", content="And now?"))
    second, fresh = [
        await gateway.ask(salt, chat=chat, sampling=BRIEF, cache_salt=salt)
        for salt in (str(ahead), "other")
    ]

    assert second.ids == fresh.ids
    assert first.num_prompt_tokens is not None
    assert second.num_prompt_tokens is not None
    num_cached = second.ending.num_cached_tokens if second.ending else 0
    if ahead:  # all but what the last turn and the rest of a block are
        assert num_cached > second.num_prompt_tokens - 2 * BLOCK_SIZE
    else:
        assert num_cached <= first.num_prompt_tokens
    assert await num_computed_ahead(executor) == before + ahead


async def with_thoughts_and_text(gateway: GatewayStream) -> dict[str, Any]:
    """Return what has an answer of thoughts, and of a text of some blocks behind them."""
    for seed in range(20):
        asked = conversation(SOON, seed=seed, ignore_eos=True)
        answer = await gateway.ask(f"seed {seed}", **asked, cache_salt="to try")
        if thoughts_of(answer) and sum(bool(one.text) for one in answer.tokens) > 3 * BLOCK_SIZE:
            return asked
    raise AssertionError("no answer has both")


async def test_an_adapter_answers_under_its_own_name_beside_the_model(
    gateway: GatewayStream,
) -> None:
    fields = {"text": "Rain?", "sampling": {"temperature": 0, "max_tokens": 24}}
    models = (MODEL, ADAPTER)
    alone = [await gateway.ask(f"{model}-alone", model=model, **fields) for model in models]
    beside = [await gateway.submit(f"{model}-beside", model=model, **fields) for model in models]
    for answer in beside:
        await gateway.wait(answer.done)
    other = await gateway.ask("other", model="other", **fields)
    info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())

    assert alone[0].ids != alone[1].ids
    assert [answer.ids for answer in beside] == [answer.ids for answer in alone]
    assert other.reject_code == "UNKNOWN_MODEL"
    assert (Path(info.root).name, [one.model for one in info.adapters]) == (MODEL, [ADAPTER])
    assert Path(info.adapters[0].root).name == ADAPTER
    assert info.fingerprint
    assert info.adapters[0].fingerprint not in ("", info.fingerprint)


CALL = {
    "tools": [gen.Tool(name="f", parameters='{"type": "object", "properties": {"x": {}}}')],
    "tool_choice": gen.TOOL_CHOICE_REQUIRED,
}


@pytest.mark.parametrize(
    ("bias", "options"),
    [
        (SOON, {"seed": 1}),
        (SOON, {"seed": 1, "omits_reasoning": True, "logprobs": 1}),
        (SOON, {"seed": 2, "structured_outputs": CHOICE}),
        (NOW, {"seed": 1, **CALL}),
    ],
    ids=["thoughts", "thoughts not told", "a form behind them", "a call behind them"],
)
async def test_an_answer_goes_on_among_its_thoughts_and_behind_them(
    gateway: GatewayStream, bias: dict[int, float], options: dict[str, Any]
) -> None:
    fields = conversation(bias, **options)
    answer = await gateway.ask("answer", **fields)

    await assert_goes_on(gateway, "answer", answer, **fields)


async def test_an_answer_of_an_adapter_goes_on(gateway: GatewayStream) -> None:
    fields = {"text": "Rain?", "model": ADAPTER, "sampling": BRIEF}
    answer = await gateway.ask("adapter", **fields)

    await assert_goes_on(gateway, "adapter", answer, **fields)


HOT = {"temperature": 1, "seed": 1, "max_tokens": 40}
CHAT_AGAIN = {"model": MODEL, "messages": [{"role": "user", "content": "Rain?"}], "stream": True}
TEXT_AGAIN = {"model": MODEL, "prompt": "Rain?", "stream": True}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}
SENT_AGAIN: dict[str, tuple[str, Body]] = {
    "greedy": (TEXT_AGAIN, {"temperature": 0, "max_tokens": 40}),
    "penalties": (TEXT_AGAIN, {**HOT, "presence_penalty": 1.5, "frequency_penalty": 0.5}),
    "likely": (TEXT_AGAIN, {**HOT, "logprobs": 1, "ignore_eos": True}),
    "thoughts": (CHAT_AGAIN, {**HOT, "logit_bias": {str(END_OF_THOUGHT): 6.0}}),
    "form": (
        CHAT_AGAIN,
        {
            **HOT,
            "logit_bias": {str(END_OF_THOUGHT): 7.0},
            "structured_outputs": {"regex": "[a-z]{9}é[a-z]{9}"},
        },
    ),
    "call": (
        CHAT_AGAIN,
        {
            **HOT,
            "logit_bias": {str(END_OF_THOUGHT): 100.0},
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
        },
    ),
}


def of_any_call(events: list[str]) -> list[str]:
    """Return events with calls that have no name of their own, and floats to three places."""
    rounded = [re.sub(r"-?\d+\.\d+", lambda one: f"{float(one[0]):.3f}", event) for event in events]
    return [re.sub(r"chatcmpl-tool-\w+", "call", event) for event in rounded]


@pytest.mark.parametrize("name", SENT_AGAIN)
async def test_an_answer_that_is_sent_again_goes_on(executor: ExecutorProcess, name: str) -> None:
    """With some of its tokens told again, or none; characters are cut in two."""
    first, more = SENT_AGAIN[name]
    body = with_ids(first | more)
    path = "/v1/completions" if "prompt" in first else "/v1/chat/completions"
    async with gateway_for(executor) as client:
        await client.wait_ready()
        whole = of_any_call(await events_of(client, path, body))
        ids = ids_in(whole)
        assert len(ids) > 8
        for given in (1, 2, len(ids) // 2, len(ids) // 2 + 1, len(ids) - 1, len(ids)):
            for delivered in {given} if name == "likely" else {0, given // 2, given}:
                rest = await events_of(client, path, again(body, ids[:given], delivered))

                assert of_any_call(rest) == behind(whole, delivered), (given, delivered)


@pytest.mark.parametrize(
    ("ids", "more", "why"),
    [
        ([5, 1 << 20], {}, "must be in"),
        ([5, 6, 7], {"max_tokens": 2}, "more than 2"),
        ([END_OF_THOUGHT, 5], {"structured_outputs": {"regex": "[a-z]{9}"}}, "cannot go on"),
        ([5, 6, 7], {"stop_token_ids": [6]}, "ended before"),
    ],
    ids=["no such token", "too many", "another form's", "behind the end"],
)
async def test_ids_with_which_no_answer_goes_on_are_refused(
    executor: ExecutorProcess, ids: list[int], more: Body, why: str
) -> None:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        answer = await client.http.post("/v1/chat/completions", json=again(CHAT_AGAIN | more, ids))

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "evenflow.resume.token_ids"
    assert why in answer.json()["error"]["message"]


async def test_a_request_whose_reader_has_stopped_gives_way_and_goes_on_where_it_was(
    gateway: GatewayStream,
) -> None:
    """The pool has no room for two: who comes later waits for ever if nothing gives way."""
    long = {"text": PROMPT * 45, "sampling": {"temperature": 0, "max_tokens": 512}}
    held = await gateway.submit("held", **long)
    await gateway.wait(held.started)
    await gateway.hold("held")
    await gateway.observed("held", pb.REQUEST_STATE_PAUSED)
    other = await gateway.ask("other", text=PROMPT[4:] * 45, sampling=BRIEF)
    num_before = len(held.tokens)
    await gateway.hold("held", held=False)
    await gateway.has_tokens(held, num_before + 32)
    await gateway.abort(held, "held")
    num_tokens = len(held.ids)
    never_held = await gateway.ask(
        "never-held", text=long["text"], sampling=BRIEF | {"max_tokens": num_tokens}
    )

    assert (held.num_prompt_tokens or 0) + (other.num_prompt_tokens or 0) > NUM_TOKENS
    assert len(other.ids) == BRIEF["max_tokens"]
    assert held.ids == never_held.ids


async def test_requests_fail_and_may_be_retried_when_the_engine_dies(
    executor: ExecutorProcess, gateway: GatewayStream
) -> None:
    """The last test: its engine serves no other one."""
    engine = executor.engine_processes()
    assert len(engine) == 2  # EngineCore and one worker
    sampling = {"temperature": 0, "max_tokens": NUM_TOKENS - 256}
    answers = [await gateway.submit(f"r{i}", text="hello", sampling=sampling) for i in range(3)]
    for answer in answers:
        await gateway.wait(answer.started)
    next(p for p in engine if "EngineCore" in " ".join(p.cmdline())).kill()
    for answer in answers:
        await gateway.wait(answer.done)
        assert answer.ending is not None
        assert answer.ending.failure.retryable
    with pytest.raises(aio.AioRpcError) as caught:
        await asyncio.wait_for(gateway.reader, timeout=ANSWER_TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    assert await asyncio.to_thread(executor.process.wait, EXIT_TIMEOUT_S) == 70
    await asyncio.to_thread(assert_gone, engine)
