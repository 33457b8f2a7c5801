"""One trace leads from a client through the gateway and the executor into the engine."""

import asyncio
import contextlib
import secrets
from functools import partial

import pytest

from lab.executor_client import ANSWER_TIMEOUT_S, MODEL
from lab.stack.executor_process import ExecutorProcess
from tests.gateways import Client, gateway_for
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan, named

pytestmark = pytest.mark.timeout(3_600)

CLIENT_SPAN_ID = "b7ad6b7169203331"
SECRET = "xyzzy-plugh"  # in a prompt


@pytest.fixture
def executor(plain_executor: ExecutorProcess) -> ExecutorProcess:
    return plain_executor


async def test_one_trace_leads_from_http_through_the_executor_to_the_engine(
    executor: ExecutorProcess, collector: OtlpReceiver
) -> None:
    spans = await trace_of_an_answer(executor, collector)

    http = named(spans, "evenflow-gateway", "POST /v1/completions")
    answer = named(spans, "evenflow-gateway", "text_completion exactness")
    taken = named(spans, "evenflow-executor", "generate exactness")
    engine = named(spans, "evenflow-engine", "llm_request")
    chain = [CLIENT_SPAN_ID, http.span_id, answer.span_id, taken.span_id]
    assert [s.parent_id for s in (http, answer, taken, engine)] == chain
    assert taken.attributes["gen_ai.usage.output_tokens"] == 5
    assert taken.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert engine.attributes["gen_ai.usage.completion_tokens"] == 5
    assert SECRET.encode() not in collector.raw


async def trace_of_an_answer(
    executor: ExecutorProcess, collector: OtlpReceiver
) -> list[ReceivedSpan]:
    """Ask until all four spans of an answer have come: those that a collector is late to take are
    dropped.
    """
    async with (
        asyncio.timeout(ANSWER_TIMEOUT_S),
        gateway_for(executor, otlp_traces_endpoint=collector.endpoint) as client,
    ):
        await client.wait_ready()
        while True:
            trace_id = secrets.token_hex(16)
            await ask_traced(client, trace_id)
            with contextlib.suppress(TimeoutError):
                await collector.until(partial(is_whole, collector, trace_id), timeout_s=60)
                return collector.of_trace(trace_id)


def is_whole(collector: OtlpReceiver, trace_id: str) -> bool:
    return len(collector.of_trace(trace_id)) == 4


async def ask_traced(client: Client, trace_id: str) -> None:
    body = {"model": MODEL, "prompt": SECRET, "max_tokens": 5, "temperature": 0}
    headers = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN_ID}-01"}
    response = await client.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
