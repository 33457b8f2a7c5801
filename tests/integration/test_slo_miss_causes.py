"""Trouble of each kind, put between an engine and its reader, is the cause of what comes late.

The scheduler is vLLM's with our parts, the way of its tokens the real one: vLLM's codec, deltas,
frames on the wire, the gateway's pacing and its metrics. The model, the network and the socket are
the test's, and so is the clock.
"""

import asyncio
import heapq
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from evenflow.executor.v1 import executor_pb2 as pb
from services.control.requests.life import Hold
from services.executor.convert import frame_to_proto
from services.executor.engine.collector import to_delta
from services.executor.request_tag import to_extra_args
from services.executor.scheduler import reader_state
from services.executor.scheduler.plain.plain_scheduler import EvenflowScheduler
from services.executor.serving.step_stream import Acceptance, StepStream
from services.gateway.errors import LinkBrokenError
from services.gateway.executors.inflight import InflightRequests
from services.gateway.live.generation import Generation
from services.gateway.live.pacer import Pacer
from services.gateway.live.reader import ReaderLimits
from services.gateway.types import GenerationRequest, RequestId, Token
from services.generation.prompts import TextPrompt
from services.kit.errors import ServiceError
from services.pacing.attainment import violates_delivered_tbt
from services.pacing.cause import Cause
from services.pacing.deposit import due_times_s
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel
from tests.integration.plain_schedulers import making, scheduler_config

INTERVAL_S = 0.1
LEVEL = ServiceLevel(consumption_rate_tps=1 / INTERVAL_S, slo_ttft_s=0.3, pace_tail=True)
NUM_TRIALS = 20  # of each kind of trouble
PROMPT_TOKEN_S = 1e-3
LIMITS = ReaderLimits(max_undelivered_tokens=4, max_deposit_bytes=1 << 20, max_pace_tail_s=60.0)


@pytest.fixture(scope="module")
def config() -> Any:
    return scheduler_config()


@pytest.fixture
def scheduler(config: Any) -> Iterator[Any]:
    with making(EvenflowScheduler, config, num_blocks=128) as made:
        yield made


class World:
    """Virtual time, and what is to happen in it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic  # the wall clock is the same one here

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), do))

    def timer(self, delay_s: float, callback: Callable[[], None]) -> Any:
        """Call back; one that is cancelled does as well, and finds nothing due."""
        self.at(self.now_s + delay_s, callback)
        return SimpleNamespace(cancel=lambda: None)

    async def pass_until(self, time_s: float) -> None:
        while self._events and self._events[0][0] <= time_s:
            at_s, _, do = heapq.heappop(self._events)
            self.now_s = max(self.now_s, at_s)
            do()
            for _ in range(4):  # whoever waits for it
                await asyncio.sleep(0)
        self.now_s = max(self.now_s, time_s)


class Socket:
    """Takes tokens while its reader reads."""

    def __init__(self, world: World) -> None:
        self.written_s: list[float] = []  # of each token
        self._world = world
        self._reads = asyncio.Event()
        self._reads.set()

    @property
    def is_open(self) -> bool:
        return self._reads.is_set()

    async def opened(self) -> None:
        await self._reads.wait()

    def write(self, tokens: Sequence[Token], *, as_one: bool) -> None:
        self.written_s += [self._world()] * len(tokens)

    def stop(self) -> None:
        self._reads.clear()

    def go_on(self) -> None:
        self._reads.set()


def add(
    scheduler: Any,
    name: str,
    *,
    num_tokens: int,
    arrived_s: float,
    level: ServiceLevel = NO_SERVICE_LEVEL,
) -> None:
    """Have the engine take a request with a prompt of so many tokens."""
    params = SamplingParams(max_tokens=500, extra_args=to_extra_args(level))
    scheduler.add_request(Request(name, [0] * num_tokens, params, None, arrival_time=arrived_s))


class Way:
    """One request's way: from a scheduler that the test runs, to a reader."""

    def __init__(self, name: str, scheduler: Any, world: World, rng: random.Random) -> None:
        self.name, self.scheduler, self.world, self.rng = name, scheduler, world, rng
        self.socket = Socket(world)
        self._arrived_s: list[float] = []  # of each token at the gateway
        self._arrival_s = 0.0  # of the newest
        self.network_s = 0.0  # of frames that leave now, beside the usual
        request = GenerationRequest(
            request_id=RequestId(name), model="m", prompt=TextPrompt("Hi"), service_level=LEVEL
        )
        pacer = Pacer(clock=world, timer=world.timer)
        self.generation = Generation(
            request, pacer=pacer, clock=world, arrived_s=world(), limits=LIMITS
        )
        self._inflight = InflightRequests()
        self._inflight.add({name: self.generation})
        self._stream = StepStream()
        self._stream.accept(name, Acceptance(1))
        add(scheduler, name, num_tokens=40, arrived_s=world(), level=LEVEL)

    def taken(self) -> None:
        """Do nothing: it is taken already."""

    def lost(self, error: ServiceError) -> None:
        """Have it go on: with the same scheduler, which knows nothing of it."""
        self.generation.continuation.gap_since_s = self.world()

    def progressed(self, num_delivered: int) -> None:
        """Do nothing: without a planner nobody asks."""

    def lags(self, hold: bool) -> None:
        self.scheduler.hold({self.generation.request.request_id: hold})

    async def step(self, *, extra_s: float = 0.0, stall_s: float = 0.0) -> None:
        """Run a step of 80 to 95 ms, longer by what prompts, trouble and stalls add."""
        world, scheduler = self.world, self.scheduler
        output = scheduler.schedule()
        num_prompt_tokens = sum(n for n in output.num_scheduled_tokens.values() if n > 1)
        own_s = self.rng.uniform(0.08, 0.095) + PROMPT_TOKEN_S * num_prompt_tokens
        await world.pass_until(world() + own_s + extra_s + stall_s)
        ids = list(output.num_scheduled_tokens)
        model_output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids],
        )
        scheduler.stall_s = stall_s
        outputs = scheduler.update_from_output(output, model_output)
        for one in _as_the_front_reads(outputs):
            if one.request_id == self.name:
                await self._send(one)

    async def _send(self, output: Any) -> None:
        finish = output.finish_reason and str(output.finish_reason)
        completion = SimpleNamespace(
            text="x",
            token_ids=output.new_token_ids,
            finish_reason=finish,
            stop_reason=None,
            logprobs=None,
        )
        self._stream.push(
            self.name,
            to_delta(
                SimpleNamespace(
                    outputs=[completion],
                    prompt_token_ids=None,
                    prompt_logprobs=None,
                    num_cached_tokens=0,
                    kv_transfer_params=output.kv_transfer_params,
                )
            ),
        )
        frame = await self._stream.next_frame()
        assert frame is not None
        message = frame_to_proto(frame).SerializeToString()
        usual_s = self.rng.uniform(0.0, 0.003)
        self._arrival_s = max(self._arrival_s, self.world() + usual_s + self.network_s)
        self._arrived_s.append(self._arrival_s)
        self.world.at(self._arrival_s, lambda: self._arrive(message))

    @property
    def num_late(self) -> int:
        """Return how many tokens came late to the reader, by their definition."""
        due_s, written_s = due_times_s(self._arrived_s, INTERVAL_S), self.socket.written_s
        assert len(written_s) == len(due_s)
        return sum(
            violates_delivered_tbt(now_s, before_s, INTERVAL_S)
            for before_s, now_s in zip(due_s, written_s[1:], strict=False)
        )

    def _arrive(self, message: bytes) -> None:
        frame = pb.StreamResponse.FromString(message)
        self._inflight.apply(frame, self.world())


def _as_the_front_reads(outputs: Mapping[int, EngineCoreOutputs]) -> Iterator[Any]:
    for one in outputs.values():
        yield from MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(one)).outputs


@asynccontextmanager
async def way(name: str, scheduler: Any, world: World, rng: random.Random) -> AsyncIterator[Way]:
    """Open a way; at the end what is under way comes to its reader, who leaves."""
    one = Way(name, scheduler, world, rng)
    one.generation.accepted(40)
    one.generation.held_by(one)
    writing = asyncio.create_task(one.generation.write_to(one.socket))
    await asyncio.sleep(0)
    yield one
    await world.pass_until(world() + 5.0)
    one.generation.cancel()
    await writing
    one.generation.close()
    scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)


async def wait_in_line(one: Way, trouble_s: float) -> None:
    end_s = one.world() + trouble_s
    while one.world() < end_s:
        await one.step()
    one.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)


async def meet_a_prompt(one: Way, trouble_s: float) -> None:
    num_tokens = int(trouble_s / PROMPT_TOKEN_S)
    add(one.scheduler, "other", num_tokens=num_tokens, arrived_s=one.world())
    await one.step()


async def wait_for_copies(one: Way, trouble_s: float) -> None:
    await one.step(stall_s=trouble_s)


async def be_paused(one: Way, trouble_s: float) -> None:
    end_s = one.world() + trouble_s
    record = one.scheduler.records[one.name]
    record.hold(Hold.PLAN, one.world())
    add(one.scheduler, "other", num_tokens=1, arrived_s=one.world())  # so that steps go on
    while one.world() < end_s:
        await one.step()
    record.release(Hold.PLAN, one.world())


async def run_too_long_a_step(one: Way, trouble_s: float) -> None:
    await one.step(extra_s=trouble_s)


async def stop_reading(one: Way, trouble_s: float) -> None:
    end_s = one.world() + trouble_s
    one.socket.stop()
    add(one.scheduler, "other", num_tokens=1, arrived_s=one.world())
    one.world.at(end_s, one.socket.go_on)
    while one.world() < end_s:
        await one.step()


async def lose_the_network(one: Way, trouble_s: float) -> None:
    one.network_s = trouble_s
    await one.step()
    one.network_s = 0.0


async def lose_the_executor(one: Way, trouble_s: float) -> None:
    await one.world.pass_until(one.world() + 0.01)  # nothing is on its way
    one.generation.failed(LinkBrokenError())
    await one.world.pass_until(one.world() + trouble_s)
    await one.step()


TROUBLES: Mapping[Cause, Callable[[Way, float], Awaitable[None]]] = {
    Cause.QUEUE: wait_in_line,
    Cause.PROMPTS: meet_a_prompt,
    Cause.COPIES: wait_for_copies,
    Cause.PAUSE: be_paused,
    Cause.PLANNER: run_too_long_a_step,
    Cause.READER: stop_reading,
    Cause.NETWORK: lose_the_network,
    Cause.FAILOVER: lose_the_executor,
}


def counted(name: str, **labels: str) -> Counter[Cause]:
    return Counter(
        {
            cause: REGISTRY.get_sample_value(name, {**labels, "cause": cause.value}) or 0
            for cause in Cause
        }
    )


@pytest.mark.parametrize("injected", TROUBLES)
async def test_trouble_is_the_cause_of_what_it_makes_late(
    injected: Cause, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TROUBLES.keys() == set(Cause)
    rng, world = random.Random(injected.value), World()
    monkeypatch.setattr(reader_state, "time", world)
    slo = "ttft" if injected is Cause.QUEUE else "tbt"
    before = counted("evenflow_slo_misses_total", slo=slo)
    waited_s = counted("evenflow_rebuffering_seconds_total")
    num_late = 0
    for number in range(NUM_TRIALS):
        is_crowded = injected is Cause.QUEUE
        if is_crowded:
            add(scheduler, "first", num_tokens=1, arrived_s=world())
        scheduler.max_num_active_reqs = 1 if is_crowded else 4
        async with way(f"r{number}", scheduler, world, rng) as one:
            await live(one, injected, rng.uniform(0.4, 0.9))
        num_late += 1 if is_crowded else one.num_late

    found = counted("evenflow_slo_misses_total", slo=slo) - before
    assert found.total() == num_late >= NUM_TRIALS
    assert found[injected] >= 0.9 * num_late
    if not is_crowded:
        waited = counted("evenflow_rebuffering_seconds_total") - waited_s
        assert waited[injected] >= 0.9 * waited.total() > 0.2 * NUM_TRIALS


async def live(one: Way, injected: Cause, trouble_s: float) -> None:
    """Run a request into its trouble, with a little of other kinds around."""
    for _ in range(0 if injected is Cause.QUEUE else 4):
        await one.step()
    await TROUBLES[injected](one, trouble_s)
    for _ in range(4):
        await one.step(stall_s=one.rng.uniform(0.0, 0.003), extra_s=one.rng.uniform(0.0, 0.003))
