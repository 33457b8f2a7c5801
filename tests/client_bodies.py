"""Requests as clients of OpenAI's and vLLM's servers send them, by their documentation and code."""

from dataclasses import dataclass, field
from typing import Any

from tests.fake_executor import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CACHED = {"cache_control": {"type": "ephemeral"}}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where."}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
}
CALLED = {"name": "weather", "arguments": '{"city": "Rome"}'}


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One request of a client."""

    client: str
    path: str = CHAT
    body: dict[str, Any]  # without its model
    ignored: frozenset[str] = field(default=frozenset())  # of it, without effect on the answer

    @property
    def whole_body(self) -> dict[str, Any]:
        return {"model": MODEL, **self.body}


def text_part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


SENT = (
    Sent(
        client="openai-python, all that wrappers add",
        body={
            "messages": [{"role": "developer", "content": "Be brief."}],
            "metadata": {"team": "a"},
            "store": False,
            "service_tier": "auto",
            "safety_identifier": "user-1",
            "prompt_cache_key": "k",
            "verbosity": "medium",
            "user": "user-1",
            "modalities": ["text"],
            "n": 1,
            "stream": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False},
        },
        ignored=frozenset(
            {
                "metadata",
                "store",
                "service_tier",
                "safety_identifier",
                "verbosity",
                "user",
                "stream_options.include_obfuscation",
            }
        ),
    ),
    Sent(
        client="openai-python, a streamed turn that was put together and sent back",
        body={
            "messages": [
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "function_call": None,
                    "parsed": None,
                    "reasoning": "Rome is meant.",
                    "reasoning_content": "Rome is meant.",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "index": 0,
                            "type": "function",
                            "function": {**CALLED, "parsed_arguments": {"city": "Rome"}},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "Sunny."},
            ],
            "tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}],  # type: ignore[dict-item]
        },
        ignored=frozenset(
            {
                "messages.annotations",
                "messages.tool_calls.index",
                "messages.tool_calls.function.parsed_arguments",
            }
        ),
    ),
    Sent(
        client="LibreChat",
        body={
            "messages": [
                {"role": "system", "content": ""},
                {"role": "user", "content": [text_part("Hi")], "name": "ada"},
            ],
            "user": "65f1c0ffee0000000000beef",
            "temperature": 1,
            "top_p": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        ignored=frozenset({"user"}),
    ),
    Sent(
        client="Dify",
        body={
            "messages": [
                {"role": "system", "content": "You are helpful."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": ""},
                {"role": "user", "content": "Again"},
            ],
            "user": "5d3b7a8e-0000-4000-8000-000000000000",
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 512,
            "stop": [],
            "tools": [],
            "tool_choice": "auto",
            "stream": True,
        },
        ignored=frozenset({"user"}),
    ),
    Sent(
        client="AutoGen",
        body={
            "messages": [
                {"role": "system", "content": "You are a planner."},
                {"role": "user", "name": "user", "content": "Weather in Rome?"},
                {
                    "role": "assistant",
                    "name": "weather_agent",
                    "content": None,
                    "tool_calls": [{"id": "c1", "type": "function", "function": CALLED}],
                },
                {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": "Sunny."},
                {"role": "user", "name": "critic", "content": "Say it in French."},
            ],
            "tools": [{**TOOL, "function": {**TOOL["function"], "strict": False}}],  # type: ignore[dict-item]
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "stream": False,
        },
    ),
    Sent(
        client="LangChain's ChatOpenAI",
        body={
            "messages": [
                {"role": "system", "content": "You are helpful."},
                {"role": "user", "content": "Weather?", "name": "ada"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"type": "function", "id": "c1", "function": {**CALLED, "arguments": ""}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "", "name": "weather"},
            ],
            "n": 1,
            "temperature": 0.7,
            "user": "ada",
            "tools": [TOOL],
            "parallel_tool_calls": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        ignored=frozenset({"user"}),
    ),
    Sent(
        client="LangChain's ChatOpenAI, where no tool is bound",
        body={
            "messages": [{"role": "user", "content": "Hi"}],
            "metadata": {},
            "store": False,
            "parallel_tool_calls": True,
            "stream": False,
            "stream_options": {"include_usage": True},
        },
        ignored=frozenset({"metadata", "store", "stream_options"}),
    ),
    Sent(
        client="LiteLLM proxy",
        body={
            "messages": [
                {"role": "system", "content": [text_part("Be brief.", **CACHED)]},
                {"role": "user", "content": "Weather?", **CACHED},
                {
                    "role": "assistant",
                    "content": "",
                    "function_call": None,
                    "annotations": [],
                    "provider_specific_fields": {"refusal": None},
                    "thinking_blocks": [],
                    "reasoning_content": "Rome.",
                    "tool_calls": [
                        {"index": 0, "id": "c1", "type": "function", "function": CALLED}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "Sunny."},
            ],
            "tools": [{**TOOL, **CACHED}],
            "user": "team-a",
            "metadata": {"requester": "ada"},
            "max_tokens": 4096,
        },
        ignored=frozenset(
            {
                "user",
                "metadata",
                "tools.cache_control",
                "messages.cache_control",
                "messages.content.cache_control",
                "messages.annotations",
                "messages.provider_specific_fields",
                "messages.thinking_blocks",
                "messages.tool_calls.index",
            }
        ),
    ),
    Sent(
        client="aider with cached prompts",
        body={
            "messages": [
                {"role": "system", "content": [text_part("Act as an engineer.", **CACHED)]},
                {"role": "user", "content": "Fix it."},
                {"role": "assistant", "content": "Ok."},
                {"role": "user", "content": [text_part("Here:", **CACHED), text_part("x = 1")]},
            ],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        ignored=frozenset({"messages.content.cache_control"}),
    ),
    Sent(
        client="Continue, chat",
        body={
            "messages": [
                {"role": "system", "content": "You are in chat mode."},
                {"role": "user", "content": [text_part("Explain.")]},
            ],
            "max_tokens": 4096,
            "stream": True,
            "stream_options": {"include_usage": True},
            "parallel_tool_calls": False,
            "prediction": {"type": "content", "content": "x = 1"},
        },
        ignored=frozenset({"prediction"}),
    ),
    Sent(
        client="Continue, autocomplete",
        path=COMPLETIONS,
        body={
            "prompt": "<|fim_prefix|>x = <|fim_suffix|>\n<|fim_middle|>",
            "max_tokens": 256,
            "temperature": 0.01,
            "stream": True,
            "stop": [
                "<|endoftext|>",
                "<|fim_prefix|>",
                "<|fim_middle|>",
                "<|fim_suffix|>",
                "<|fim_pad|>",
                "<|repo_name|>",
                "<|file_sep|>",
                "<|im_start|>",
                "<|im_end|>",
                "/src/",
                "#- coding: utf-8",
                "```",
            ],
        },
    ),
    Sent(
        client="OpenHands",
        body={
            "messages": [
                {"role": "system", "content": [text_part("You are OpenHands.", **CACHED)]},
                {"role": "user", "content": [text_part("List the files.")]},
                {
                    "role": "assistant",
                    "content": [text_part("Listing.")],
                    "tool_calls": [{"id": "c1", "type": "function", "function": CALLED}],
                },
                {
                    "role": "tool",
                    "content": [text_part("a.py", **CACHED)],
                    "tool_call_id": "c1",
                    "name": "weather",
                },
            ],
            "tools": [TOOL],
            "temperature": 0.0,
            "top_p": 1.0,
            "max_completion_tokens": 4096,
            "metadata": {"session_id": "s", "trace_version": "1.0", "tags": ["agent:CodeAct"]},
        },
        ignored=frozenset({"metadata", "messages.content.cache_control"}),
    ),
    Sent(
        client="Open WebUI",
        body={
            "messages": [
                {"role": "system", "content": ""},
                {"role": "user", "content": "Hi"},
            ],
            "temperature": 0.8,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    Sent(
        client="Open WebUI, the title of a chat",
        body={
            "messages": [{"role": "user", "content": "### Task: a title."}],
            "max_completion_tokens": 1000,
            "stream": False,
        },
    ),
    Sent(
        client="lm-eval, likelihoods",
        path=COMPLETIONS,
        body={
            "prompt": [[1, 2, 3], [4, 5]],
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
            "temperature": 0,
        },
    ),
    Sent(
        client="lm-eval, answers to a conversation",
        body={
            "messages": [{"role": "user", "content": "Q: 1 + 1?", "type": "text"}],
            "max_tokens": 256,
            "temperature": 0,
            "stop": ["Q:", "\n\n", "<|im_end|>"],
            "seed": 1234,
        },
        ignored=frozenset({"messages.type"}),
    ),
    Sent(
        client="vllm bench serve, completions",
        path=COMPLETIONS,
        body={
            "prompt": "Hi",
            "repetition_penalty": 1.0,
            "max_tokens": 128,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
        },
    ),
    Sent(
        client="vllm bench serve, chat",
        body={
            "messages": [{"role": "user", "content": [text_part("Hi")]}],
            "max_completion_tokens": 128,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    Sent(
        client="a script for vLLM's server",
        path=COMPLETIONS,
        body={
            "prompt": "Hi",
            "best_of": 1,
            "use_beam_search": False,
            "length_penalty": 1.0,
            "top_k": -1,
            "add_special_tokens": True,
            "request_id": "mine",
        },
        ignored=frozenset({"length_penalty", "request_id"}),
    ),
)
