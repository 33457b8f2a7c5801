"""A real executor with layer-wise KV behind a real channel: a prompt larger than its pool."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.executor_client import ANSWER_TIMEOUT_S, MODEL, GatewayStream, places, resume_of
from lab.models import NUM_LAYERS
from lab.stack.executor_process import ExecutorProcess
from lab.stack.processes import EXIT_TIMEOUT_S
from tests.chromium import Browser, needs_chromium
from tests.executor_stock import StockAnswers, near, stock_answers
from tests.executors.ahead import num_computed_ahead
from tests.executors.continuing import returned_tokens
from tests.gateways import Client, gateway_for
from tests.stock_requests import PROMPT, SCORED, TOO_LONG

pytestmark = pytest.mark.timeout(3_600)

BLOCK_SIZE = 32
CALLING = {"temperature": 1, "seed": 3, "max_tokens": 400}  # the form of a call has an end
LOOKS = gen.ConversationOptions(
    tools=[gen.Tool(name="look")],
    tool_choice=gen.TOOL_CHOICE_REQUIRED,
    forbids_parallel_calls=True,
)
LAYERS_PER_GROUP = 2  # of NUM_LAYERS
NUM_BLOCKS = 81  # one is vLLM's own; the others hold 80 / 4 * 32 = 640 tokens of all layers


@pytest.fixture(scope="module")
def roomy() -> StockAnswers:
    """The answers of stock vLLM with a pool that holds everything."""
    return stock_answers("layerwise")


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorProcess]:
    process = ExecutorProcess(
        tmp_path_factory.mktemp("executor") / "executor.log",
        MAX_MODEL_LEN=2048,  # the pool must hold a group of it
        LAYERWISE_KV=True,
        KV_LAYERS_PER_GROUP=LAYERS_PER_GROUP,
        KV_LINK_BYTES_PER_S=1e9,
        BLOCK_SIZE=BLOCK_SIZE,
        NUM_GPU_BLOCKS_OVERRIDE=NUM_BLOCKS,
    )
    with process.serving():
        yield process


def read_metrics(executor: ExecutorProcess) -> dict[str, float]:
    url = f"http://127.0.0.1:{executor.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S) as response:
        text = response.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_pool_is_described_in_blocks_of_a_layer_group(gateway: GatewayStream) -> None:
    info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())

    assert (info.num_gpu_blocks, info.block_size) == (NUM_BLOCKS, BLOCK_SIZE)
    assert info.layers_per_group == LAYERS_PER_GROUP


async def test_the_readers_that_there_is_room_for_are_counted(gateway: GatewayStream) -> None:
    info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())
    readers = info.kv.readers

    # One pool is less than a third of the context: too few for turns.
    assert (readers.num_tokens, readers.num_held) == (2_048, 0)
    assert (readers.num_sustained, readers.wanted_host_bytes) == (0, 0)
    assert readers.limit == pb.READER_LIMIT_POOL
    assert readers.num_kept == info.kv.num_host_tokens // (2_048 + BLOCK_SIZE)
    assert readers.host_bytes == info.kv.num_host_tokens * info.kv.token_bytes


async def test_a_prompt_larger_than_the_pool_gets_the_tokens_of_a_roomy_engine(
    roomy: StockAnswers, executor: ExecutorProcess, gateway: GatewayStream
) -> None:
    info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())
    num_resident_tokens = (
        info.num_gpu_blocks * info.block_size * info.layers_per_group // info.num_layers
    )
    assert roomy["long"]["num_prompt_tokens"] > num_resident_tokens

    answers = await asyncio.gather(
        *(
            gateway.ask(name, text=request["prompt"], sampling=request["sampling"])
            for name, request in TOO_LONG.items()
        )
    )

    for name, answer in zip(TOO_LONG, answers, strict=True):
        assert answer.ids == roomy[name]["ids"]
        assert answer.text == roomy[name]["text"]
    metrics = await asyncio.to_thread(read_metrics, executor)
    assert metrics["vllm:evenflow_kv_num_loads_total"] > 0
    assert metrics["vllm:evenflow_kv_h2d_bytes_total"] > 0
    assert metrics["vllm:evenflow_kv_d2h_bytes_total"] > 0
    assert metrics["vllm:evenflow_kv_step_stall_s_count"] > 0


async def test_the_default_policy_takes_requests_of_all_priorities(gateway: GatewayStream) -> None:
    sampling = gen.SamplingParams(temperature=0.0, max_tokens=4)
    answers = await asyncio.gather(
        *(
            gateway.ask(f"priority{priority}", text=PROMPT, sampling=sampling, priority=priority)
            for priority in (-3, 0, 7)
        )
    )

    assert answers[0].ids == answers[1].ids == answers[2].ids
    assert len(answers[0].ids) == 4


async def test_a_prompt_that_was_asked_before_is_cached_but_for_whoever_has_another_salt(
    roomy: StockAnswers, executor: ExecutorProcess, gateway: GatewayStream
) -> None:
    request = TOO_LONG["long"]
    first = await gateway.ask("first", text=request["prompt"], sampling=request["sampling"])

    again, apart = [
        await gateway.ask(
            name, text=request["prompt"], sampling=request["sampling"], cache_salt=salt
        )
        for name, salt in (("again", ""), ("apart", "somebody else's"))
    ]

    assert first.ids == again.ids == apart.ids == roomy["long"]["ids"]
    assert again.ending.num_cached_tokens > 0
    assert again.ending.num_cached_tokens % BLOCK_SIZE == 0
    assert apart.ending.num_cached_tokens == 0


async def test_an_answer_that_goes_on_finds_its_prompt_on_the_host(
    executor: ExecutorProcess, gateway: GatewayStream
) -> None:
    request = TOO_LONG["long"]
    fields = {"text": request["prompt"], "sampling": request["sampling"]}
    first = await gateway.ask("first", **fields)
    before = returned_tokens(executor)
    rest = await gateway.ask("goes on", **fields, resume=resume_of(first, 3))
    after = returned_tokens(executor)

    counted = {name: after[name] - before[name] for name in after}
    assert rest.ids == first.ids[3:]
    assert sum(counted.values()) == (first.num_prompt_tokens or 0) + 3
    assert counted["found"] > counted["computed"] > 0


async def test_what_is_asked_for_is_kept_up_to_the_accounts_share_and_released_by_session(
    roomy: StockAnswers, gateway: GatewayStream
) -> None:
    info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())
    num_columns = info.kv.num_host_tokens // BLOCK_SIZE // 4  # a quarter of the host
    request, mark = TOO_LONG["long"], gen.RetentionMark(retention_s=600.0)
    hint = gen.RetentionHint(account="alice", session_id="s", marks=[mark])

    answer = await gateway.ask(
        "kept", text=request["prompt"], sampling=request["sampling"], retention=hint
    )

    assert answer.ids == roomy["long"]["ids"]
    span = gen.RetainedSpan(end=num_columns * BLOCK_SIZE, retention_s=600.0)
    clipped = gen.Retained(status=gen.RETENTION_STATUS_CLIPPED, spans=[span])
    assert answer.ending.retained == clipped
    told = await gateway.stub.GetKVHolders(pb.GetKVHoldersRequest(limit=1))
    (session,) = told.sessions
    assert (session.account, session.session_id, told.num_sessions) == ("alice", "s", 1)
    assert session.num_retained_tokens == span.end
    assert 0 < session.num_host_tokens <= span.end
    assert 0.0 < session.retained_for_s <= 601.0
    released = [
        await gateway.stub.ReleaseSession(pb.ReleaseSessionRequest(account=name, session_id="s"))
        for name in ("bob", "alice", "alice")
    ]
    assert [one.num_tokens for one in released] == [0, span.end, 0]
    told = await gateway.stub.GetKVHolders(pb.GetKVHoldersRequest())
    assert (list(told.sessions), told.num_sessions) == ([], 0)


async def test_what_a_turn_with_a_tool_call_leaves_is_kept_until_its_session_ends(
    executor: ExecutorProcess, gateway: GatewayStream
) -> None:
    turns = [gen.ChatMessage(role="user", content="Rain in Oslo? " * 20)]
    chat = pb.Chat(messages=turns, options=LOOKS)
    hint = gen.RetentionHint(account="alice", session_id="agent", next_prefix=True)

    answer = await gateway.ask("calls", chat=chat, sampling=CALLING, retention=hint)

    assert answer.finish_reason == "TOOL_CALLS"
    assert not answer.ending.HasField("retained")  # nothing was asked for
    (call_id,) = {part.id for token in answer.tokens for part in token.tool_calls if part.id}
    released = await gateway.stub.ReleaseSession(
        pb.ReleaseSessionRequest(account="alice", session_id="agent")
    )
    num_tokens = (answer.num_prompt_tokens or 0) + len(answer.ids)
    assert released.num_tokens == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE

    while not await num_computed_ahead(executor):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    call = gen.ToolCall(id=call_id, name="look", arguments="{}")
    turns += [
        gen.ChatMessage(role="assistant", tool_calls=[call]),
        gen.ChatMessage(role="tool", content="No.", tool_call_id=call.id),
    ]
    sampling = {"temperature": 0, "max_tokens": 4}
    await gateway.ask("goes on", chat=pb.Chat(messages=turns), sampling=sampling)
    metrics = await asyncio.to_thread(read_metrics, executor)
    assert metrics["evenflow_executor_tool_wait_seconds_count"] == 1
    assert metrics["vllm:evenflow_kv_num_kept_tool_turns_total"] == 1


async def test_what_waits_for_its_tool_is_back_in_the_pool_of_an_engine_without_requests(
    executor: ExecutorProcess, gateway: GatewayStream
) -> None:
    async def num_returned() -> float:
        metrics = await asyncio.to_thread(read_metrics, executor)
        return metrics["vllm:evenflow_kv_num_returned_blocks_total"]

    turns = [gen.ChatMessage(role="user", content="Snow in Bergen? " * 20)]
    before = await num_returned()
    answer = await gateway.ask(
        "waits", chat=pb.Chat(messages=turns, options=LOOKS), sampling=CALLING
    )
    assert answer.finish_reason == "TOOL_CALLS"

    number = 0
    while await num_returned() == before:
        number += 1
        other = f"{number}. {PROMPT * 26}"  # takes most of the pool
        await gateway.ask(f"other {number}", text=other, sampling={"max_tokens": 2})
        await asyncio.sleep(0.2)  # an engine without requests goes on


async def test_probabilities_of_prompts_larger_than_the_pool_are_those_of_a_roomy_engine(
    roomy: StockAnswers, gateway: GatewayStream
) -> None:
    likely, echo = await asyncio.gather(
        gateway.ask(
            "likely",
            text=SCORED["likely"]["prompt"],
            sampling=SCORED["likely"]["sampling"],
        ),
        gateway.ask(
            "echo",
            text=SCORED["echo"]["prompt"],
            sampling={"temperature": 0, "max_tokens": 8, "logprobs": 2},
            echo=True,
        ),
    )

    for name, answer in (("likely", likely), ("echo", echo)):
        scored = [token.logprobs for token in answer.tokens]
        assert answer.ids == roomy[name]["ids"]
        assert places(scored) == [near(place) for place in roomy[name]["logprobs"]]
    assert echo.prompt is not None
    assert echo.prompt.text == SCORED["echo"]["prompt"]
    expected = [near(place) for place in roomy["echo"]["prompt_logprobs"][1:]]
    assert places(echo.prompt.logprobs[1:]) == expected


async def test_an_answer_to_a_prompt_larger_than_the_pool_keeps_to_its_form(
    gateway: GatewayStream,
) -> None:
    form = gen.StructuredOutputs(regex="(ab){40}c")
    sampling = gen.SamplingParams(temperature=1, seed=1, max_tokens=200, structured_outputs=form)
    too_soon = gen.ServiceLevel(slo_ttft_s=1e-6, slo_tbt_s=1e-6)
    held, free = await asyncio.gather(
        gateway.ask("held", text=PROMPT * 24, sampling=sampling),
        gateway.ask(
            "free",
            text=PROMPT * 20,
            sampling={"temperature": 0, "max_tokens": 64},
            service_level=too_soon,
        ),
    )

    assert (held.text, held.finish_reason) == ("ab" * 40 + "c", "STOP")
    assert len(free.ids) == 64
    assert all(token.delay.cause and token.delay.late_s > 0.0 for token in free.tokens)
    assert not any(token.HasField("delay") for token in held.tokens)  # nothing was promised


async def test_a_watcher_sees_where_the_kv_of_each_layer_group_is(gateway: GatewayStream) -> None:
    updates = gateway.updates()
    await anext(updates)
    sampling = {"temperature": 0, "max_tokens": 1_000}
    answers = {
        name: await gateway.submit(name, text=PROMPT * 24, sampling=sampling) for name in "ab"
    }
    seen: set[int] = set()
    async for update in updates:
        for request in update.requests:
            assert len(request.residency) in (0, NUM_LAYERS // LAYERS_PER_GROUP)
            seen.update(request.residency)
        assert 0 <= update.num_free_pool_blocks <= update.num_pool_blocks
        if {pb.RESIDENCY_RESIDENT, pb.RESIDENCY_OFFLOADED} <= seen:
            break
    for name, answer in answers.items():
        await gateway.abort(answer, name)


@needs_chromium
async def test_the_page_shows_that_layers_of_a_long_prompt_are_on_the_host(
    executor: ExecutorProcess, tmp_path: Path
) -> None:
    body = {
        "model": MODEL,
        "prompt": TOO_LONG["long"]["prompt"],
        "stream": True,
        "max_tokens": 1_000,
        "ignore_eos": True,
    }
    browser = Browser(tmp_path)
    try:
        async with gateway_for(executor) as client, browser.page() as page:
            await client.wait_ready()
            await page.goto(f"{client.base_url}/ui")
            await page.until("document.querySelector('.status')?.innerText == 'live'")
            async with client.http.stream("POST", "/v1/completions", json=body):
                await page.until(
                    "document.querySelector('li canvas')?.dataset.layers?.includes('O')"
                )
                layers = await page.value("document.querySelector('li canvas').dataset.layers")
    finally:
        browser.stop()

    assert len(layers) == NUM_LAYERS // LAYERS_PER_GROUP


async def test_a_changed_pace_reaches_the_scheduler_while_the_request_runs(
    executor: ExecutorProcess,
) -> None:
    body = {
        "model": MODEL,
        "prompt": TOO_LONG["short"]["prompt"],
        "stream": True,
        "max_tokens": 1_000,
        "ignore_eos": True,
        "evenflow": {"consumption_rate_tps": 2.0},
    }
    name = {"x-request-id": "paced"}
    async with gateway_for(executor) as client:
        await client.wait_ready()
        async with client.http.stream("POST", "/v1/completions", json=body, headers=name) as stream:
            lines = stream.aiter_lines()  # whose end would be the stream's
            await anext(lines)
            for rate_tps in (2.0, 5.0):
                changed = await client.http.patch(
                    "/v1/streams/paced", json={"consumption_rate_tps": rate_tps}
                )
                assert changed.status_code == 200
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await seen_at(client, 1 / rate_tps)


async def seen_at(client: Client, interval_s: float) -> None:
    """Wait until who watches sees a request with so much time between two tokens."""
    watch = "/v1/evenflow/watch?max_updates_per_s=20"
    async with client.http.stream("GET", watch) as updates:
        async for line in updates.aiter_lines():
            if line and interval_s in [
                request["release_interval_s"]
                for request in json.loads(line.removeprefix("data: "))["requests"]
            ]:
                return
    raise AssertionError("the watch has ended")


async def test_who_leaves_says_so_and_lets_what_is_live_end(
    executor: ExecutorProcess, gateway: GatewayStream
) -> None:
    """The last test: its engine serves no other one."""
    sampling = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}
    answer = await gateway.submit("live", text=PROMPT, sampling=sampling)
    await gateway.wait(answer.started)
    executor.process.terminate()
    await gateway.until(lambda: gateway.frames[-1].is_leaving)
    late = await gateway.ask("late", text=PROMPT, sampling=sampling)
    await gateway.wait(answer.done)

    assert late.reject_code == "UNAVAILABLE"
    assert (answer.finish_reason, len(answer.ids)) == ("LENGTH", 400)
    assert await asyncio.to_thread(executor.process.wait, EXIT_TIMEOUT_S) == 0
