"""The gRPC edge over a real channel, with stubs and with a client built from reflection."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_database, descriptor_pb2, descriptor_pool, message_factory
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from evenflow.executor.v1 import executor_pb2
from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from services.kit.rpc import name_of_request
from tests.fake_executor import EVENT_TIMEOUT_S, MODEL, NUM_PROMPT_TOKENS, Script
from tests.gateways import Client, gateway_for

AT_ONCE = gen.ServiceLevel(consumption_rate_tps=1, release=gen.RELEASE_AT_ONCE)
SERVICE = "evenflow.gateway.v1.GatewayService"


@pytest.fixture
def stub(client: Client) -> Any:
    return pb_grpc.GatewayServiceStub(client.channel)


def make_chat(**overrides: Any) -> pb.ChatRequest:
    fields = {"model": MODEL, "messages": [gen.ChatMessage(role="user", content="Hi")]}
    return pb.ChatRequest(**(fields | overrides))


def named(request_id: str) -> tuple[tuple[str, str], ...]:
    return (("x-request-id", request_id),)


async def read(call: Any) -> tuple[list[pb.Token], pb.Finish]:
    """Return all tokens and the ending, which only the last message may carry."""
    responses = []
    while (response := await call.read()) is not aio.EOF:
        responses.append(response)
    assert [response.HasField("finish") for response in responses[:-1]] == [False] * (
        len(responses) - 1
    )
    tokens = [token for response in responses for token in response.tokens]
    return tokens, responses[-1].finish


FINISH = pb.Finish(
    reason=gen.FINISH_REASON_STOP,
    usage=gen.Usage(num_prompt_tokens=NUM_PROMPT_TOKENS, num_output_tokens=3),
)
TOKENS = [
    pb.Token(index=0, id=100, text="Hello"),
    pb.Token(index=1, id=101, text=","),
    pb.Token(index=2, id=102, text=" world"),
]


async def test_a_chat_streams_tokens_and_then_its_ending(stub) -> None:
    assert await read(stub.Chat(make_chat())) == (TOKENS, FINISH)


@pytest.mark.parametrize("prompt", [{"text": "Hi"}, {"token_ids": gen.TokenIds(ids=[1, 2])}])
async def test_a_prompt_of_either_kind_is_completed(stub, executor, prompt) -> None:
    request = pb.GenerateRequest(
        model=MODEL,
        sampling=gen.SamplingParams(max_tokens=4, stop=["x"]),
        service_level=gen.ServiceLevel(slo_ttft_s=1.0),
        **prompt,
    )

    assert await read(stub.Generate(request)) == (TOKENS, FINISH)

    (submit,) = executor.submits
    assert (submit.text, list(submit.token_ids.ids)) == (
        (prompt["text"], []) if "text" in prompt else ("", [1, 2])
    )
    assert submit.sampling == request.sampling
    assert submit.service_level == request.service_level


async def test_tokens_without_text_are_sent_too(stub, executor) -> None:
    executor.script = Script(texts=["", "é", ""])

    tokens, _ = await read(stub.Chat(make_chat()))

    assert [token.text for token in tokens] == ["", "é", ""]


async def test_a_rate_paces_the_stream(stub, executor) -> None:
    executor.script = Script(texts=["x"] * 5)
    level = gen.ServiceLevel(consumption_rate_tps=10, pace_tail=True)
    loop = asyncio.get_running_loop()

    asked_s = loop.time()
    arrived_s = []
    async for response in stub.Chat(make_chat(service_level=level)):
        arrived_s += [loop.time() - asked_s] * len(response.tokens)

    assert len(arrived_s) == 5
    assert all(at_s >= 0.1 * number for number, at_s in enumerate(arrived_s))


@pytest.mark.parametrize("asked", [AT_ONCE, gen.ServiceLevel()])
async def test_text_may_go_out_at_once_and_be_read_later(executor, asked) -> None:
    """As the client says, or the operator where it says nothing."""
    executor.script = Script(texts=["x"] * 60)  # one a second would take a minute
    async with gateway_for(executor, default_reading_rate_tps={MODEL: 1}) as client:
        await client.wait_ready()
        stub: Any = pb_grpc.GatewayServiceStub(client.channel)
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        tokens, _ = await read(stub.Chat(make_chat(service_level=asked)))

    assert len(tokens) == 60
    assert loop.time() - asked_s < 30.0
    assert executor.submits[0].service_level == AT_ONCE


async def test_the_request_id_is_returned_before_the_answer(stub, executor) -> None:
    executor.script.generating.clear()
    call = stub.Chat(make_chat(), metadata=named("mine"))
    unnamed = stub.Chat(make_chat())

    assert dict(await call.initial_metadata())["x-request-id"] == "mine"
    assert dict(await unnamed.initial_metadata())["x-request-id"].startswith("req-")
    await executor.until(lambda: len(executor.submits) == 2)
    executor.script.generating.set()
    await read(call)
    await read(unnamed)


async def test_an_unknown_model_is_a_status_with_a_reason(stub, executor) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await read(stub.Chat(make_chat(model="other")))

    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert dict(caught.value.trailing_metadata())["error-reason"] == "MODEL_NOT_FOUND"
    assert executor.submits == []


async def test_a_refusal_of_the_executor_is_a_status(stub, executor) -> None:
    executor.script = Script(
        reject=executor_pb2.Rejected(code=executor_pb2.REJECT_CODE_OVERLOADED, message="full")
    )

    with pytest.raises(aio.AioRpcError) as caught:
        await read(stub.Chat(make_chat()))

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "full"


async def test_a_dying_executor_makes_the_call_unavailable(stub, executor) -> None:
    executor.script.ending.clear()
    call = stub.Chat(make_chat(), metadata=named("r"))
    tokens = []
    while len(tokens) < 3:
        tokens += (await call.read()).tokens

    await executor.kill()

    with pytest.raises(aio.AioRpcError) as caught:
        await call.read()
    assert tokens == TOKENS
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("gate", ["accepting", "generating", "ending"])
async def test_a_cancelled_call_aborts_the_request(client, stub, executor, gate) -> None:
    getattr(executor.script, gate).clear()
    call = stub.Chat(make_chat(), metadata=named("gone"))
    await executor.until(lambda: len(executor.submits) == 1)
    if gate == "ending":
        await executor.until(lambda: executor.delivered.get("gone") == 3)

    call.cancel()

    await executor.until(lambda: executor.aborted == ["gone"])
    await client.wait_idle()
    client.gateway.pacer.check_integrity()


async def test_a_client_that_does_not_read_can_still_cancel(client, stub, executor) -> None:
    executor.script = Script(texts=["x" * 100_000] * 50)  # more than any window takes
    call = stub.Chat(make_chat(), metadata=named("stuck"))
    await executor.until(lambda: executor.delivered.get("stuck", 0) > 0)
    executor_has_ended = len(executor.aborted)

    call.cancel()

    await client.wait_idle()
    assert executor_has_ended == 0


async def test_a_passed_deadline_aborts_the_request(client, stub, executor) -> None:
    executor.script.ending.clear()

    # The shortest deadline that leaves time to reach the executor.
    for deadline_s in (0.2, 2.0, 20.0, 100.0):
        with pytest.raises(aio.AioRpcError) as caught:
            await read(
                stub.Chat(make_chat(), metadata=named(f"late-{deadline_s}"), timeout=deadline_s)
            )
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await client.wait_idle()
        if executor.submits:
            break

    await executor.until(
        lambda: executor.aborted == [name_of_request(s.request_id) for s in executor.submits] != []
    )
    await client.wait_idle()


@pytest.mark.parametrize("slo_tbt_s", [None, 3_600.0])
async def test_cancel_by_id_ends_the_stream_as_cancelled(client, stub, executor, slo_tbt_s) -> None:
    executor.script.ending.clear()
    level = gen.ServiceLevel(slo_tbt_s=slo_tbt_s)
    call = stub.Chat(make_chat(service_level=level), metadata=named("r"))
    await call.read()

    await stub.Cancel(pb.CancelRequest(request_id="r"))
    _, finish = await read(call)

    assert finish.reason == gen.FINISH_REASON_CANCELLED
    assert finish.usage.num_prompt_tokens == NUM_PROMPT_TOKENS
    await executor.until(lambda: executor.aborted == ["r"])
    await client.wait_idle()


async def test_cancel_before_acceptance_is_not_lost(client, stub, executor) -> None:
    executor.script.accepting.clear()
    call = stub.Chat(make_chat(), metadata=named("r"))
    await executor.until(lambda: len(executor.submits) == 1)

    await stub.Cancel(pb.CancelRequest(request_id="r"))
    tokens, finish = await read(call)

    assert (tokens, finish.reason) == ([], gen.FINISH_REASON_CANCELLED)


async def test_a_cancelled_http_request_ends_with_an_error(client, stub, executor) -> None:
    executor.script.generating.clear()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    answer = asyncio.create_task(
        client.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "r"})
    )
    await executor.until(lambda: len(executor.submits) == 1)

    await stub.Cancel(pb.CancelRequest(request_id="r"))

    assert (await answer).status_code == 409
    assert (await answer).json()["error"]["code"] == "cancelled"


@pytest.mark.parametrize(
    ("request_id", "code"), [("nobody", "NOT_FOUND"), ("", "INVALID_ARGUMENT")]
)
async def test_cancel_of_nothing_says_so(stub, request_id, code) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Cancel(pb.CancelRequest(request_id=request_id))

    assert caught.value.code().name == code


async def test_cancel_ends_all_requests_of_one_name(client, stub, executor) -> None:
    executor.script.ending.clear()
    calls = [stub.Chat(make_chat(), metadata=named("twice")) for _ in range(2)]
    for call in calls:
        await call.read()

    await stub.Cancel(pb.CancelRequest(request_id="twice"))

    for call in calls:
        _, finish = await read(call)
        assert finish.reason == gen.FINISH_REASON_CANCELLED


async def test_models_are_listed(stub) -> None:
    assert await stub.ListModels(pb.ListModelsRequest()) == pb.ListModelsResponse(
        models=[pb.Model(id=MODEL, max_model_len=4096)]
    )


async def test_health_says_what_ready_says(client, executor) -> None:
    health = health_pb2_grpc.HealthStub(client.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=EVENT_TIMEOUT_S)

    async def status() -> int:
        return (await watch.read()).status

    assert await status() == health_pb2.HealthCheckResponse.SERVING
    await executor.kill()
    assert await status() == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await client.http.get("/ready")).status_code == 503
    await executor.start()
    assert await status() == health_pb2.HealthCheckResponse.SERVING
    assert (await client.http.get("/ready")).status_code == 200
    watch.cancel()


async def test_a_client_built_from_reflection_gets_the_answer(client) -> None:
    database = descriptor_database.DescriptorDatabase()
    reflection = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
    call = reflection.ServerReflectionInfo(iter([ask]), timeout=EVENT_TIMEOUT_S)
    for serialized in (await call.read()).file_descriptor_response.file_descriptor_proto:
        database.Add(descriptor_pb2.FileDescriptorProto.FromString(serialized))
    pool = descriptor_pool.DescriptorPool(database)
    method = pool.FindServiceByName(SERVICE).FindMethodByName("Chat")
    request = message_factory.GetMessageClass(method.input_type)(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}]
    )

    chat = client.channel.unary_stream(
        f"/{SERVICE}/Chat",
        request_serializer=type(request).SerializeToString,
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    tokens, finish = await read(chat(request))

    assert "".join(token.text for token in tokens) == "Hello, world"
    assert finish.usage.num_output_tokens == 3
