"""What clients of other servers send beside a request: taken, taken without effect, or refused."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.client_bodies import CACHED, CALLED, CHAT, COMPLETIONS, TOOL, text_part
from tests.fake_executor import MODEL

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": CALLED}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "Sunny."}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter, and what becomes of it."""

    name: str
    body: dict[str, Any]
    path: str = CHAT
    status: int = 200
    named: str = ""  # in the header of a 200, as the parameter at fault of a 400


def answering(*, path: str = CHAT, named: str = "", **body: Any) -> Row:
    """Return a row of a parameter that is taken; `named`: without effect."""
    return Row(name=",".join(body), path=path, body=body, named=named)


def refused(name: str, *, path: str = CHAT, **body: Any) -> Row:
    return Row(name=name, path=path, body=body, status=400, named=name)


def turn(name: str, turns: list[dict[str, Any]], *, named: str = "", status: int = 200) -> Row:
    """Return a row of a conversation that goes on after a user's turn."""
    return Row(name=name, body={"messages": [USER, *turns, USER]}, named=named, status=status)


def said(**more: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "So.", **more}]


def part(**more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"text": "Hi", **more}]}]


# Of clients that keep more of a turn, or speak to other servers too.
KEPT: dict[str, Any] = {
    "opts": {"visible": True},
    "agent": "planner",
    "messageId": "m1",
    "timestamp": 1,
    "createdAt": "2026-01-01T00:00:00Z",
    "metadata": {},
    "parts": [{"type": "text", "text": "Hi"}],
    "experimental_attachments": [],
    "model": "gpt",
    "usage": {"total_tokens": 1},
    "images": [],
    "type": "message",
    "weight": 1,
    "prefix": True,
    "phase": "final",
    "extra_content": {},
}
FOR_OTHERS: dict[str, Any] = {
    "thinking": {"type": "enabled"},
    "enable_thinking": False,
    "reasoning": {"effort": "low"},
    "usage": {"include": True},
    "provider": {"order": ["x"]},
    "transforms": [],
    "plugins": [],
    "extra_body": {"a": 1},
    "keep_alive": "5m",
    "options": {"num_ctx": 4096},
    "num_ctx": 4096,
    "repeat_penalty": 1.1,
    "typical_p": 1.0,
    "mirostat": 0,
    "cache_prompt": True,
    "samplers": ["top_k"],
    "timings_per_token": True,
    "chat_id": "c",
    "safe_prompt": False,
}
ADVISORY = [
    answering(user="u", named="user"),
    answering(metadata={"a": "b"}, named="metadata"),
    answering(store=True, named="store"),
    answering(service_tier="auto", named="service_tier"),
    answering(safety_identifier="u", named="safety_identifier"),
    answering(verbosity="low", named="verbosity"),
]
TURNS = [
    turn("name", [USER | {"name": "ada"}]),
    turn("a tool's name", [*said(tool_calls=[CALL]), RESULT | {"name": "weather"}]),
    turn("annotations", said(annotations=[]), named="messages.annotations"),
    turn(
        "index",
        [*said(tool_calls=[CALL | {"index": 0}]), RESULT],
        named="messages.tool_calls.index",
    ),
    turn("reasoning", said(reasoning="Rome.")),
    turn("cache_control", [USER | CACHED], named="messages.cache_control"),
    turn(
        "cache_control of a part",
        [{"role": "user", "content": [text_part("Hi", **CACHED)]}],
        named="messages.content.cache_control",
    ),
    turn("empty system", [{"role": "system", "content": ""}]),
    turn("empty user", [{"role": "user", "content": ""}]),
    turn(
        "empty arguments",
        [*said(tool_calls=[CALL | {"function": {"name": "weather", "arguments": ""}}]), RESULT],
    ),
    turn(
        "image",
        part(type="image_url", image_url={"url": "data:,"}),
        named="messages.content.image_url",
    ),
    turn(
        "audio",
        part(type="input_audio", input_audio={"data": "", "format": "wav"}),
        named="messages.content.input_audio",
    ),
    turn(
        "a call cut short",
        [*said(tool_calls=[CALL | {"function": {"name": "f", "arguments": '{"ci'}}]), RESULT],
        named="messages.tool_calls.function.arguments",
    ),
    turn("a refusal", said(refusal="No.")),
    turn("function_call", said(function_call={}), named="messages[1].function_call", status=400),
    turn("a tool part", part(type="tool"), named="messages[1].content", status=400),
    *(turn(name, [USER | {name: value}], named=f"messages.{name}") for name, value in KEPT.items()),
]
OTHERS = [
    row
    for name, value in FOR_OTHERS.items()
    for row in (
        answering(**{name: value}, named=name),
        answering(path=COMPLETIONS, **{name: value}, named=name),
    )
]


def described(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", **more}}


TOOLS = [
    answering(tools=[described(**{"return": {"type": "string"}})], named="tools.function.return"),
    answering(tools=[described(returns="a string")], named="tools.function.returns"),
    answering(tools=[described(defer_loading=True)], named="tools.function.defer_loading"),
    answering(tools=[TOOL | {"defer_loading": True}], named="tools.defer_loading"),
    answering(documents=[]),
]
CALLS = [
    answering(stop=[str(k) for k in range(16)]),
    refused("stop", stop=[str(k) for k in range(17)]),
    answering(
        stream=True,
        stream_options={"include_obfuscation": True},
        named="stream_options.include_obfuscation",
    ),
    answering(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    answering(stream_options={"include_usage": True}, named="stream_options"),
    answering(path=COMPLETIONS, best_of=1),
    refused("best_of", path=COMPLETIONS, best_of=2),
    answering(tools=[]),
    answering(tool_choice="auto"),
    answering(tool_choice="none"),
    refused("tool_choice", tool_choice="required"),
    answering(tools=[TOOL], tool_choice="required"),
    answering(parallel_tool_calls=False),
    answering(path=COMPLETIONS, max_tokens=0, echo=True),
    refused("max_tokens", path=COMPLETIONS, max_tokens=0),
    answering(path=COMPLETIONS, suffix=""),
    refused("suffix", path=COMPLETIONS, suffix="x"),
]
OF_VLLM = [
    answering(cache_salt="s"),
    answering(bad_words=["x"]),
    answering(allowed_token_ids=[1]),
    answering(logit_bias={"1": -100}),
    answering(n=2, logprobs=True, top_logprobs=2),
    answering(path=COMPLETIONS, n=2, logprobs=2),
    answering(return_token_ids=True),
    answering(path=COMPLETIONS, return_token_ids=True),
    answering(skip_special_tokens=False),
    answering(include_stop_str_in_output=True),
    answering(continue_final_message=True, add_generation_prompt=False),
    refused("continue_final_message", continue_final_message=True),
    answering(structured_outputs={"regex": "a+"}),
    refused("structured_outputs.json", structured_outputs={"json": {"type": "object"}}),
    refused("prompt_logprobs", path=COMPLETIONS, prompt_logprobs=1),
    refused("truncate_prompt_tokens", truncate_prompt_tokens=5),
    refused("vllm_xargs", vllm_xargs={"a": 1}),
    *(
        refused(name, path=path, **{name: value})
        for path in (CHAT, COMPLETIONS)
        for name, value in {
            "guided_json": {"type": "object"},
            "guided_choice": ["a"],
            "guided_regex": "a+",
            "guided_grammar": 'root ::= "a"',
            "regex": "a+",
            "chat_template": "{{ messages }}",
        }.items()
    ),
]
ROWS = [*ADVISORY, *TURNS, *OTHERS, *TOOLS, *CALLS, *OF_VLLM]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
async def test_what_a_client_adds_is_taken_or_named(client, executor, row: Row) -> None:
    prompt = {"messages": [USER]} if row.path == CHAT else {"prompt": "Hi"}

    response = await client.http.post(row.path, json={"model": MODEL, **prompt, **row.body})

    assert response.status_code == row.status, response.text
    is_taken = row.status == 200
    header = response.headers.get("x-evenflow-ignored", "")
    assert (header if is_taken else response.json()["error"]["param"]) == row.named
    assert bool(executor.submits) == is_taken
    await client.wait_idle()


@pytest.mark.parametrize("row", ADVISORY, ids=[row.name for row in ADVISORY])
async def test_a_strict_body_is_refused_for_each(client, executor, row: Row) -> None:
    strict = {"model": MODEL, "messages": [USER], "evenflow": {"strict": True}}

    response = await client.http.post(CHAT, json=strict | row.body)

    assert (response.status_code, response.json()["error"]["param"]) == (400, row.named)
    assert not executor.submits
