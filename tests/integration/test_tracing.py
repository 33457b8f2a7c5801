"""A request's trace, as a collector gets it by OTLP from the gateway."""

import asyncio
from collections.abc import Iterator

import pytest

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from services.kit.telemetry import tracing
from tests.fake_executor import MODEL, NUM_PROMPT_TOKENS, FakeExecutor
from tests.gateways import chat_body, gateway_for, until
from tests.otlp_receiver import OtlpReceiver, named, otlp_receiver

TRACE_ID, CLIENT_SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01"
SECRET = "xyzzy-plugh"  # in a prompt


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 60)  # so that nothing is dropped
    with otlp_receiver() as receiver:
        yield receiver


async def test_without_an_endpoint_nothing_is_traced_but_the_clients_trace_is_passed_on(
    executor: FakeExecutor,
) -> None:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        await client.http.post("/v1/chat/completions", json=chat_body())
        headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
        await client.http.post("/v1/chat/completions", json=chat_body(), headers=headers)

    without, traced = executor.submits
    assert not without.HasField("trace_context")
    assert traced.trace_context.traceparent == TRACEPARENT
    assert traced.trace_context.tracestate == "vendor=1"


async def test_the_gateways_spans_tell_counts_and_times_and_no_text(
    executor: FakeExecutor, receiver: OtlpReceiver
) -> None:
    body = chat_body(messages=[{"role": "user", "content": SECRET}], max_tokens=9, stream=True)
    async with gateway_for(executor, otlp_traces_endpoint=receiver.endpoint) as client:
        await client.wait_ready()
        await client.http.get("/health")
        response = await client.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
        await client.http.post("/v1/chat/completions", json=chat_body(model="other"))

    http, refused = (s for s in receiver.spans if s.name == "POST /v1/chat/completions")
    assert (http.parent_id, http.attributes["http.response.status_code"]) == ("", 200)
    assert (refused.is_error, refused.attributes["http.response.status_code"]) == (False, 404)
    answer = named(receiver.spans, "evenflow-gateway", f"chat {MODEL}")
    assert (answer.trace_id, answer.parent_id) == (http.trace_id, http.span_id)
    assert answer.attributes["gen_ai.operation.name"] == "chat"
    assert answer.attributes["gen_ai.request.model"] == MODEL
    assert answer.attributes["gen_ai.request.max_tokens"] == 9
    assert answer.attributes["gen_ai.usage.input_tokens"] == NUM_PROMPT_TOKENS
    assert answer.attributes["gen_ai.usage.output_tokens"] == 3
    assert answer.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert answer.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert named(receiver.spans, "evenflow-gateway", "chat other").is_error
    assert len(receiver.spans) == 4  # none of the probe
    for text in (SECRET, "Hello", "world"):  # what went in, and what came out
        assert text.encode() not in receiver.raw
    submitted = executor.submits[0].trace_context.traceparent
    assert submitted.split("-")[1:3] == [answer.trace_id, answer.span_id]


async def test_a_grpc_call_belongs_to_its_callers_trace(
    executor: FakeExecutor, receiver: OtlpReceiver
) -> None:
    async with gateway_for(executor, otlp_traces_endpoint=receiver.endpoint) as client:
        await client.wait_ready()
        stub = pb_grpc.GatewayServiceStub(client.channel)
        call = stub.Generate(
            pb.GenerateRequest(model=MODEL, text=SECRET),
            metadata=(("traceparent", TRACEPARENT),),
        )
        assert [part async for part in call][-1].HasField("finish")

    answer = named(receiver.spans, "evenflow-gateway", f"text_completion {MODEL}")
    assert (answer.trace_id, answer.parent_id) == (TRACE_ID, CLIENT_SPAN_ID)


async def test_a_span_tells_that_its_answer_moved(
    executor: FakeExecutor, receiver: OtlpReceiver
) -> None:
    executor.script.generating.clear()
    async with gateway_for(executor, otlp_traces_endpoint=receiver.endpoint) as client:
        await client.wait_ready()
        answer = asyncio.create_task(client.http.post("/v1/chat/completions", json=chat_body()))
        await until(lambda: len(executor.submits) == 1)
        await executor.kill()
        await executor.start()
        executor.script.generating.set()
        assert (await answer).status_code == 200

    told = named(receiver.spans, "evenflow-gateway", f"chat {MODEL}").events["evenflow.move"]
    assert told.pop("evenflow.move.waited_s") >= 0
    assert told == {
        "evenflow.move.cause": "link",
        "evenflow.move.result": "begun_again",
        "evenflow.move.from_address": executor.address,
        "evenflow.move.to_address": executor.address,
        "evenflow.move.num_tokens": 0,
    }


async def test_a_collector_that_is_away_costs_no_answer(executor: FakeExecutor) -> None:
    async with gateway_for(executor, otlp_traces_endpoint="http://127.0.0.1:1") as client:
        await client.wait_ready()
        response = await client.http.post("/v1/chat/completions", json=chat_body())

    assert response.status_code == 200
