"""A client that a generator makes of `/openapi.json`, against the gateway that describes itself."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from services.gateway.http.openapi import openapi_document
from tests.fake_executor import MODEL, FakeExecutor
from tests.gateways import Client, gateway_for

PACKAGE = "generated_client"
SAID = "Say hello."
HELLO = {"role": "user", "content": SAID}
ADVICE = gen.SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat_completions": ("/v1/chat/completions", {"messages": [HELLO]}),
    "completions": ("/v1/completions", {"prompt": SAID}),
    "responses": ("/v1/responses", {"input": SAID}),
    "messages": ("/v1/messages", {"messages": [HELLO], "max_tokens": 9}),
}
BODY_CLASSES = {
    "chat_completions": "ChatCompletionBody",
    "completions": "CompletionBody",
    "responses": "ResponsesBody",
    "messages": "MessagesBody",
    "count_tokens": "CountTokensBody",
    "tokenize": "TokenizeBody",
    "detokenize": "DetokenizeBody",
}
Call: TypeAlias = Callable[..., Any]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Generate the package; whatever the generator leaves out is a failure."""
    place = tmp_path_factory.mktemp("generated")
    described = place / "openapi.json"
    described.write_text(json.dumps(openapi_document("0")))
    beside = Path(sys.executable).parent
    command: list[str | Path] = [beside / "openapi-python-client", "generate", "--fail-on-warning"]
    command += ["--path", described, "--output-path", place / PACKAGE, "--meta", "none"]
    path = os.pathsep.join([str(beside), os.environ["PATH"]])  # it looks for ruff
    subprocess.run(command, check=True, env=os.environ | {"PATH": path})
    sys.path.insert(0, str(place))
    yield importlib.import_module(PACKAGE)
    sys.path.remove(str(place))


@pytest.fixture
def hello(generated: ModuleType) -> dict[str, dict[str, Any]]:
    """Return, by operation, what a body has to say, in the generated types."""
    models = importlib.import_module(f"{PACKAGE}.models")
    turn = models.Turn(role=models.TurnRole.USER, content=SAID)
    return {
        "chat_completions": {
            "messages": [models.Message(role=models.MessageRole.USER, content=SAID)]
        },
        "completions": {"prompt": SAID},
        "responses": {"input_": SAID},
        "messages": {"messages": [turn], "max_tokens": 9},
        "count_tokens": {"messages": [turn]},
    }


@pytest.fixture
async def executor() -> AsyncIterator[FakeExecutor]:
    executor = FakeExecutor(default_sampling=ADVICE)
    await executor.start()
    yield executor
    await executor.kill()


@pytest.fixture
async def client(executor: FakeExecutor) -> AsyncIterator[Client]:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        yield client


@pytest.fixture
async def call(generated: ModuleType, client: Client) -> AsyncIterator[Call]:
    """Return what calls an operation by its name, with a body if it takes one."""
    async with generated.Client(base_url=client.base_url) as sdk:

        async def call(name: str, *path: str, **body: Any) -> Any:
            operation = importlib.import_module(f"{PACKAGE}.api.default.{name}")
            if name not in BODY_CLASSES:
                return await operation.asyncio(*path, client=sdk)
            models = importlib.import_module(f"{PACKAGE}.models")
            made = getattr(models, BODY_CLASSES[name])(**{"model": MODEL, **body})
            return await operation.asyncio(client=sdk, body=made)

        yield call


async def test_each_way_to_ask_is_answered_in_the_types_that_are_described(call, hello) -> None:
    chat = await call("chat_completions", **hello["chat_completions"], n=2)
    completion = await call("completions", **hello["completions"])
    response = await call("responses", **hello["responses"])
    message = await call("messages", **hello["messages"])

    assert [choice.message.content for choice in chat.choices] == ["Hello, world"] * 2
    assert chat.usage.completion_tokens == 6
    assert completion.choices[0].text == "Hello, world"
    assert response.output[0].content[0].text == "Hello, world"
    assert message.content[0].text == "Hello, world"
    assert message.usage.output_tokens == 3


@pytest.mark.parametrize("name", BODIES)
async def test_what_it_says_by_itself_asks_for_nothing_else(
    call, hello, client, executor, name
) -> None:
    """Defaults that are described are sent, and mean the same as saying nothing."""
    path, body = BODIES[name]

    await call(name, **hello[name])
    plain = await client.http.post(path, json=body | {"model": MODEL})

    assert plain.status_code == 200
    generated, said = map(_without_id, executor.submits)
    assert generated == said
    assert said.sampling.temperature == ADVICE.temperature


async def test_what_is_beside_generation_is_called_too(call, hello) -> None:
    models = await call("list_models")
    model = await call("get_model", MODEL)
    tokens = await call("tokenize", prompt="Hi")
    text = await call("detokenize", tokens=[72, 105])
    count = await call("count_tokens", **hello["count_tokens"])

    assert [one.id for one in models.data] == [model.id] == [MODEL]
    assert (tokens.tokens, tokens.count) == ([72, 105], 2)
    assert text.prompt == "Hi"
    assert count.input_tokens == len(SAID)
    assert (await call("load")).server_load == 0
    assert (await call("ready")).status.value == "ready"


async def test_a_refusal_is_of_the_type_that_is_described(call, hello) -> None:
    unknown = await call("chat_completions", **hello["chat_completions"] | {"model": "no-such"})
    faulty = await call("messages", **hello["messages"] | {"temperature": 9.0})

    assert unknown.error.code == "model_not_found"
    assert faulty.error.type_ == "invalid_request_error"


def _without_id(submit: pb.Submit) -> pb.Submit:
    submit.ClearField("request_id")
    return submit
