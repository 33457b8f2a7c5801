"""SIGTERM. The last module: the stack has no executor afterwards."""

import asyncio
import signal

import pytest

from lab.executor_client import GatewayStream
from lab.models import MAX_MODEL_LEN
from lab.stack.processes import Stack, assert_gone, stopped, wait_until
from tests.clients import http_chat, recorded

pytestmark = pytest.mark.timeout(3_600)

NUM_TOKENS = 100
SAMPLING = {"temperature": 0, "max_tokens": NUM_TOKENS}
SCORED = {"max_tokens": MAX_MODEL_LEN - 512, "ignore_eos": True, "logprobs": 1}


async def test_a_gateway_that_is_told_to_end_delivers_what_is_left_at_the_readers_pace(
    stack: Stack,
) -> None:
    task = asyncio.create_task(
        http_chat(stack.base_url, "Slowly.", max_tokens=60, request_id="tail", rate_tps=10.0)
    )

    def is_live() -> bool:
        record = recorded(stack).get("tail")
        return record is not None and record.num_delivered_tokens > 2

    await asyncio.to_thread(wait_until, is_live, "it is live")
    code = await asyncio.to_thread(stack.kill, "gateway", signal.SIGTERM)
    got = await task

    assert code == 0, stack.log_tail("gateway")
    assert (got.errors, got.done, got.num_output_tokens) == ([], True, 60)
    await asyncio.to_thread(stack.start, "gateway")
    await asyncio.to_thread(stack.wait_ready)


async def test_sigterm_lets_live_streams_end_and_refuses_new_ones(stack: Stack) -> None:
    """And waits for no request that is abandoned meanwhile, before its first token."""
    engine = stack.engine_processes()
    async with GatewayStream(stack.address("executor")) as direct:
        with stopped(engine):  # so that nothing ends before the signal has arrived
            paced = asyncio.create_task(
                http_chat(
                    stack.base_url,
                    "Slowly.",
                    max_tokens=NUM_TOKENS,
                    request_id="drained",
                    rate_tps=50.0,
                )
            )
            live = await direct.submit("live", text="hello", sampling=SAMPLING)
            left = await direct.submit("left", text="hello " * 40, echo=True, sampling=SCORED)
            for answer in (live, left):
                await direct.wait(answer.accepted)
            await asyncio.to_thread(wait_until, lambda: "drained" in recorded(stack), "it is live")
            stack.terminate("executor")
            await asyncio.to_thread(
                wait_until, lambda: not stack.is_serving("executor"), "the signal has arrived"
            )
            late = await direct.ask("late", text="hello", sampling={"max_tokens": 1})
            assert late.reject_code == "UNAVAILABLE"
            await direct.abort(left, "left")
            assert (left.finish_reason, left.ids) == ("CANCELLED", [])
        await direct.wait(live.done)
        assert (live.finish_reason, len(live.ids)) == ("LENGTH", NUM_TOKENS)
        got = await paced

    code = await asyncio.to_thread(stack.wait_exit, "executor")
    assert code == 0, stack.log_tail("executor")
    assert (got.errors, got.done, got.num_output_tokens) == ([], True, NUM_TOKENS)
    await asyncio.to_thread(assert_gone, engine)
