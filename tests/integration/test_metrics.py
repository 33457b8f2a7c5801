"""Every metric of gateway, tracker and planner moves when the thing that it names happens.

Real servers in the test's own loop, so that one registry has the metrics of all processes. What the
executor's front counts moves in `tests/executors`, what its engine counts in `tests/exact`.
"""

import asyncio
import functools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from prometheus_client import REGISTRY

import services.executor.app
import services.gateway.app
import services.planner.app
import services.tracker.app  # noqa: F401  # each with all metrics of its process
from evenflow.executor.v1 import executor_pb2 as executor_pb
from evenflow.planner.v1 import planner_pb2 as planner_pb
from evenflow.planner.v1 import planner_pb2_grpc
from evenflow.tracker.v1 import tracker_pb2 as pb
from evenflow.tracker.v1 import tracker_pb2_grpc
from lab.planning.protos import make_engine, make_link, make_plan_request, make_request
from lab.policies.presets import full_name
from lab.stack.redis_server import RedisServer
from services.gateway.types import RequestId
from services.kit import clock
from services.kit.server import ServiceServer
from services.planner.decision_log import DecisionLog
from services.planner.servicer import PlannerServicer
from services.planner.worker import Worker
from services.tracker.redis.store import RedisTrackerStore
from services.tracker.servicer import TrackerServicer
from services.tracker.types import Lifetimes
from tests.fake_executor import FINGERPRINT, FakeExecutor, Script
from tests.gateways import Client, chat_body, gateway_for, stream_body, until
from tests.slow_reader import ask_and_wait

PARTS = {"histogram": ("_sum", "_count"), "counter": ("_total",)}
STATES = {  # not levels: they say what was last seen, which a test before this may have seen, too
    "evenflow_planner_warm",
    "evenflow_tracker_redis_up",
}
WAIT_S = 300.0

Reading = Mapping[str, float]
Scene = Callable[..., AsyncIterator[None]]
SEEN: set[str] = set()


def read() -> Reading:
    """Return what every sample reads now, over all its labels."""
    values: defaultdict[str, float] = defaultdict(float)
    for family in REGISTRY.collect():
        for sample in family.samples:
            values[sample.name] += sample.value
    return values


def sees(*names: str) -> Callable[[Scene], Callable[..., Awaitable[None]]]:
    """Make a test of a scene, which yields at moments: these move, and levels go back."""
    SEEN.update(names)

    def scene(act: Scene) -> Callable[..., Awaitable[None]]:
        @functools.wraps(act)
        async def test(**fixtures: Any) -> None:
            taken = [read()]
            async for _ in act(**fixtures):
                taken.append(read())
            taken.append(read())
            for name in names:
                values = [reading.get(name, 0.0) for reading in taken]
                assert set(values) != {values[0]}, f"{name} stays at {values[0]}"
                assert stays(name) or values[-1] == values[0], f"{name} does not come back"

        return test

    return scene


def stays(name: str) -> bool:
    return name in STATES or name.endswith(("_total", "_sum", "_count"))


# -- the gateway ---------------------------------------------------------------------------------

URL = "/v1/chat/completions"
EXCHANGES = "evenflow_http_request_duration_seconds_count"
RETURNS = "evenflow_gateway_stream_returns_total"
IMPATIENT = {"consumption_rate_tps": 200.0, "slo_ttft_ms": 1, "slo_tpot_ms": 1}


@sees(
    "evenflow_gateway_live_requests",
    "evenflow_gateway_requests_total",
    "evenflow_http_request_duration_seconds_sum",
    EXCHANGES,
    "evenflow_ttft_seconds_sum",
    "evenflow_ttft_seconds_count",
    "evenflow_ttfat_seconds_sum",
    "evenflow_ttfat_seconds_count",
    "evenflow_longest_gap_seconds_sum",
    "evenflow_longest_gap_seconds_count",
    "evenflow_reasoning_tokens_total",
    "evenflow_content_tokens_total",
    "evenflow_delivered_tbt_seconds_sum",
    "evenflow_delivered_tbt_seconds_count",
    "evenflow_delivered_tpot_seconds_sum",
    "evenflow_delivered_tpot_seconds_count",
    "evenflow_delivered_tokens_total",
    "evenflow_class_tokens_total",
    "evenflow_class_ttft_seconds_sum",
    "evenflow_class_ttft_seconds_count",
    "evenflow_class_wait_seconds_sum",
    "evenflow_class_wait_seconds_count",
    "evenflow_paced_tokens_total",
    "evenflow_paced_requests_total",
    "evenflow_effective_tokens_total",
    "evenflow_missed_tokens_total",
    "evenflow_reading_seconds_total",
    "evenflow_rebuffering_seconds_total",
    "evenflow_slo_misses_total",
    "evenflow_gateway_duplicate_tokens_total",
)
async def test_a_reader_waits_for_tokens(
    client: Client, executor: FakeExecutor
) -> AsyncIterator[None]:
    """The first one, and one in the middle, which comes after some that were sent twice."""
    texts = [*(f"{n} " for n in range(40)), executor_pb.Token(reasoning="hm")]
    script = executor.script = Script(texts=texts, num_reasoning_tokens=1)
    script.generating.clear()
    script.midway.clear()
    body = stream_body(evenflow=IMPATIENT)
    num_exchanges = read()[EXCHANGES]
    async with client.http.stream("POST", URL, json=body, headers={"x-request-id": "r"}) as answer:
        lines = answer.aiter_lines()
        await executor.until(lambda: bool(executor.submits))
        yield
        await asyncio.sleep(0.05)  # a promise is late after 6 ms
        script.generating.set()
        while "19 " not in await anext(lines):
            pass
        await asyncio.sleep(0.05)
        assert executor.session is not None
        executor.session.send_tokens("r", 0, script.texts[:5])
        script.midway.set()
        async for _ in lines:
            pass
    await until(lambda: read()[EXCHANGES] > num_exchanges)


@sees("evenflow_gateway_holds_total")
async def test_a_reader_stops(executor: FakeExecutor) -> AsyncIterator[None]:
    executor.script = Script(texts=["x" * 8_192] * 600, interval_s=0.001)
    async with gateway_for(executor, max_undelivered_tokens=16) as client:
        await client.wait_ready()
        async with ask_and_wait(client.gateway.http_port, stream_body(), request_id="slow"):
            await executor.until(lambda: bool(executor.holds))
    yield


@sees(
    "evenflow_unread_tokens_total",
    "evenflow_abandoned_read_frac_sum",
    "evenflow_abandoned_read_frac_count",
)
async def test_a_client_leaves_what_it_has_not_read(
    client: Client, executor: FakeExecutor
) -> AsyncIterator[None]:
    executor.script = Script(texts=["x"] * 40)
    executor.script.ending.clear()
    body = stream_body(evenflow={"consumption_rate_tps": 1, "release": "at_once"})
    async with client.http.stream("POST", URL, json=body) as answer:
        lines, num_got = answer.aiter_lines(), 0
        while num_got < 40:
            num_got += '"x"' in await anext(lines)
    await client.wait_idle()
    yield


@pytest.mark.logs(
    "gateway_started",
    "executor_connected",
    "serving_started",
    "http_served",
    "request_ended",
    "leaving",
)
@sees("evenflow_gateway_key_tokens_total")
async def test_a_key_is_used(executor: FakeExecutor, tmp_path: Path) -> AsyncIterator[None]:
    key, file = "sk-alice-0123456789", tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "alice"\nkey = "{key}"\n')
    async with gateway_for(executor, api_keys_file=file, api_keys_refresh_s=0.1) as client:
        await client.wait_ready()
        answer = None
        while answer is None or answer.status_code == 503:  # until the file is read
            bearer = {"authorization": f"Bearer {key}"}
            answer = await client.http.post(URL, json=chat_body(), headers=bearer)
        await client.wait_idle()
    yield


@pytest.mark.logs("request_moved")
@sees(
    "evenflow_gateway_moves_total",
    "evenflow_gateway_moves_hidden_total",
    "evenflow_gateway_move_gap_seconds_sum",
    "evenflow_gateway_move_gap_seconds_count",
)
async def test_an_answer_moves_while_its_reader_has_enough() -> AsyncIterator[None]:
    executors = [FakeExecutor(executor_id=str(k), fingerprint=FINGERPRINT) for k in range(2)]
    for executor in executors:
        executor.script = Script(texts=["x"] * 40)
        executor.script.midway.clear()
        await executor.start()
    async with gateway_for(*executors) as client:
        await until(lambda: all(executor.session for executor in executors))
        await client.wait_ready()
        body = stream_body(evenflow={"consumption_rate_tps": 1})
        answer = asyncio.create_task(client.http.post(URL, json=body))
        await until(lambda: client.num_generated() == [20])
        for executor in executors:
            executor.script.midway.set()
            if executor.submits:
                await executor.kill()
        await answer
    for executor in executors:
        await executor.kill()
    yield


@pytest.mark.logs("stream_let_go")
@sees(
    RETURNS,
    "evenflow_gateway_streams_let_go_total",
    "evenflow_gateway_detached_streams",
    "evenflow_gateway_kept_stream_bytes",
)
async def test_a_reader_leaves_comes_back_and_leaves_for_good(
    executor: FakeExecutor,
) -> AsyncIterator[None]:
    executor.script.midway.clear()
    async with gateway_for(executor) as client:
        await client.wait_ready()
        body, headers = stream_body(evenflow={"resumable": True}), {"x-request-id": "r"}
        streams = client.gateway.streams
        async with client.http.stream("POST", URL, json=body, headers=headers):
            stream = streams.named(RequestId("r"))
        num_returns = read()[RETURNS]
        async with client.http.stream("GET", "/v1/streams/r") as answer:
            assert answer.status_code == 200
            await until(lambda: read()[RETURNS] > num_returns)
        await until(lambda: stream.is_detached)
        streams.look_over()
        yield
        stream.left_s -= 61
        streams.look_over()
        await client.wait_idle()


@sees("evenflow_gateway_dropped_loads_total")
async def test_an_executor_tells_a_load_that_cannot_be(
    client: Client, executor: FakeExecutor
) -> AsyncIterator[None]:
    await until(lambda: executor.session is not None)  # it may only just be back
    assert executor.session is not None
    before = read()["evenflow_gateway_dropped_loads_total"]
    executor.session.send(load=executor_pb.Load(num_newcomers=-1))
    await until(lambda: read()["evenflow_gateway_dropped_loads_total"] > before)
    yield


@pytest.mark.logs("executor_lost")
@sees("evenflow_gateway_executor_connected")
async def test_an_executor_comes_and_goes(
    client: Client, executor: FakeExecutor
) -> AsyncIterator[None]:
    await executor.kill()
    await until(lambda: not client.gateway.dispatcher.is_ready)
    yield
    await executor.start()
    await client.wait_ready()


# -- the tracker ---------------------------------------------------------------------------------


@asynccontextmanager
async def served(add: Callable[[aio.Server], None]) -> AsyncIterator[str]:
    """Serve what is added; yield the address."""
    server = ServiceServer("127.0.0.1:0", [])
    add(server.grpc)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.grpc.stop(grace=None)


@pytest.mark.logs("rpc_served")
@sees(
    "evenflow_tracker_registrations_total",
    "evenflow_tracker_reports_total",
    "evenflow_tracker_entries_total",
    "evenflow_tracker_redis_up",
    "evenflow_tracker_redis_errors_total",
    "evenflow_reporter_rounds_total",
    "evenflow_reporter_entries_total",
    "evenflow_rpc_duration_seconds_sum",
    "evenflow_rpc_duration_seconds_count",
    "evenflow_rpc_errors_total",
)
async def test_a_gateway_reports_until_redis_dies(executor: FakeExecutor) -> AsyncIterator[None]:
    with RedisServer() as redis:
        lifetimes = Lifetimes(lease_ttl_s=600.0)
        store = RedisTrackerStore(redis.url, lifetimes, clock=clock.wall_s, timeout_s=20.0)
        servicer = TrackerServicer(store, lease_ttl_s=600.0, clock=clock.wall_s)
        add = functools.partial(tracker_pb2_grpc.add_TrackerServiceServicer_to_server, servicer)
        before = read()
        async with served(add) as address:
            async with gateway_for(executor, tracker=address) as client:
                await client.wait_ready()
                await client.http.post(URL, json=stream_body())
                for name in ("tracker_entries", "reporter_entries", "reporter_rounds"):
                    counter = f"evenflow_{name}_total"
                    await until(lambda counter=counter: read()[counter] > before[counter])
            yield
            redis.kill()
            async with aio.insecure_channel(address) as channel:
                stub = tracker_pb2_grpc.TrackerServiceStub(channel)
                with pytest.raises(aio.AioRpcError):
                    await stub.Snapshot(pb.SnapshotRequest(executor_id="ex0"), timeout=WAIT_S)
        await store.aclose()


# -- the planner ---------------------------------------------------------------------------------


@pytest.mark.logs("plan_made", "solver_warmed")
@sees(
    "evenflow_planner_warm",
    "evenflow_planner_plans_total",
    "evenflow_planner_pauses_total",
    "evenflow_planner_plan_duration_seconds_sum",
    "evenflow_planner_plan_duration_seconds_count",
    "evenflow_planner_gap_frac_sum",
    "evenflow_planner_gap_frac_count",
)
async def test_plans_are_made(tmp_path: Path) -> AsyncIterator[None]:
    """The pool is too small for all requests at once; the last policy makes their layers wait."""
    worker = Worker(clock.monotonic_s, max_budget_s=WAIT_S)
    worker.warm_up((4,))
    baseline = full_name("deepspeed")
    servicer = PlannerServicer(worker, DecisionLog(None), [baseline])
    add = functools.partial(planner_pb2_grpc.add_PlannerServiceServicer_to_server, servicer)
    crowd = [make_request(request_id=str(number)) for number in range(8)]
    async with served(add) as address, aio.insecure_channel(address) as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(channel)
        for num_blocks in (60, 100):
            engine = make_engine(num_blocks=num_blocks)
            request: planner_pb.PlanRequest = make_plan_request(engine=engine, requests=crowd)
            await stub.Plan(request, timeout=WAIT_S)
        slow = make_link(bytes_per_s=1e7)
        await stub.Plan(make_plan_request(policy=baseline, h2d=slow, requests=crowd))
    worker.close()
    yield


# -- none is forgotten ---------------------------------------------------------------------------


def test_every_metric_has_a_scene_in_which_it_moves() -> None:
    """One without a scene is never seen to move: write the scene, or delete the metric."""
    families = [f for f in REGISTRY.collect() if f.name.startswith("evenflow_")]
    names = {f.name + part for f in families for part in PARTS.get(f.type, ("",))}

    assert {name for name in names if not name.startswith("evenflow_executor_")} == SEEN
