"""A request's trace, as a collector gets it by OTLP from gateway, executor and engine."""

import asyncio
from pathlib import Path

import httpx
import pytest

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from services.gateway.app import run_gateway
from services.gateway.settings import GatewaySettings
from tests.executor_process import ExecutorProcess
from tests.fake_executor import MODEL, NUM_PROMPT_TOKENS, FakeExecutor
from tests.gateways import chat_body, gateway_for, until
from tests.otlp_receiver import ReceivedSpan, otlp_receiver

TRACE_ID, CLIENT_SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01"
SECRET = "xyzzy-plugh"  # in a prompt


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


async def test_the_gateways_spans_tell_counts_and_times_and_no_text(executor: FakeExecutor) -> None:
    async with otlp_receiver() as receiver:
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
        answer = receiver.named("evenflow-gateway", f"chat {MODEL}")
        assert (answer.trace_id, answer.parent_id) == (http.trace_id, http.span_id)
        assert answer.attributes["gen_ai.operation.name"] == "chat"
        assert answer.attributes["gen_ai.request.model"] == MODEL
        assert answer.attributes["gen_ai.request.max_tokens"] == 9
        assert answer.attributes["gen_ai.usage.input_tokens"] == NUM_PROMPT_TOKENS
        assert answer.attributes["gen_ai.usage.output_tokens"] == 3
        assert answer.attributes["gen_ai.response.finish_reasons"] == ["stop"]
        assert answer.attributes["gen_ai.response.time_to_first_chunk"] > 0
        assert receiver.named("evenflow-gateway", "chat other").is_error
        assert len(receiver.spans) == 4  # none of the probe
        for text in (SECRET, "Hello", "world"):  # what went in, and what came out
            assert text.encode() not in receiver.raw
        submitted = executor.submits[0].trace_context.traceparent
        assert submitted.split("-")[1:3] == [answer.trace_id, answer.span_id]


async def test_a_grpc_call_belongs_to_its_callers_trace(executor: FakeExecutor) -> None:
    async with otlp_receiver() as receiver:
        async with gateway_for(executor, otlp_traces_endpoint=receiver.endpoint) as client:
            await client.wait_ready()
            stub = pb_grpc.GatewayServiceStub(client.channel)
            call = stub.Generate(
                pb.GenerateRequest(model=MODEL, text=SECRET),
                metadata=(("traceparent", TRACEPARENT),),
            )
            assert [part async for part in call][-1].HasField("finish")

        answer = receiver.named("evenflow-gateway", f"text_completion {MODEL}")
        assert (answer.trace_id, answer.parent_id) == (TRACE_ID, CLIENT_SPAN_ID)


async def test_a_collector_that_is_away_costs_no_answer(executor: FakeExecutor) -> None:
    async with gateway_for(executor, otlp_traces_endpoint="http://127.0.0.1:1") as client:
        await client.wait_ready()
        response = await client.http.post("/v1/chat/completions", json=chat_body())

    assert response.status_code == 200


@pytest.mark.timeout(400)
async def test_one_trace_leads_from_http_through_the_executor_to_the_engine(tmp_path: Path) -> None:
    async with otlp_receiver() as receiver:
        executor = ExecutorProcess(
            tmp_path / "executor.log", OTLP_TRACES_ENDPOINT=receiver.endpoint
        )
        executor.start()
        try:
            await asyncio.to_thread(executor.wait_serving)
            await _ask(executor.address, receiver.endpoint)
            await receiver.until(lambda spans: len(_of_the_trace(spans)) == 4)
        finally:
            executor.stop()

        http = receiver.named("evenflow-gateway", "POST /v1/completions")
        answer = receiver.named("evenflow-gateway", "text_completion exactness")
        taken = receiver.named("evenflow-executor", "generate exactness")
        engine = receiver.named("evenflow-engine", "llm_request")
        chain = [CLIENT_SPAN_ID, http.span_id, answer.span_id, taken.span_id]
        assert [s.parent_id for s in (http, answer, taken, engine)] == chain
        assert taken.attributes["gen_ai.usage.output_tokens"] == 5
        assert taken.attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert engine.attributes["gen_ai.usage.completion_tokens"] == 5
        assert SECRET.encode() not in receiver.raw


def _of_the_trace(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    return [span for span in spans if span.trace_id == TRACE_ID]


async def _ask(executor_address: str, endpoint: str) -> None:
    """Ask for one answer through a gateway of its own."""
    settings = GatewaySettings(
        http_port=0,
        grpc_port=0,
        executors=executor_address,
        tracker="",
        drain_timeout_s=0,
        otlp_traces_endpoint=endpoint,
    )
    body = {"model": "exactness", "prompt": SECRET, "max_tokens": 5, "temperature": 0}
    async with run_gateway(settings) as gateway, httpx.AsyncClient(timeout=120) as client:
        base = f"http://127.0.0.1:{gateway.http_port}"
        await until(lambda: gateway.dispatcher.is_ready)
        response = await client.post(
            f"{base}/v1/completions", json=body, headers={"traceparent": TRACEPARENT}
        )
        assert response.status_code == 200, response.text
