"""Sends a trace to an executor as a gateway does, and notes when each token comes.

Readers take each token when it is due, by the function that the gateway's pacer calls; their
progress goes back as often as from a gateway.
"""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.e2e.records import RequestRecord, Sample
from bench.e2e.trace import TracedRequest
from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.executor_client import Answer, GatewayStream
from services.gateway.executors.outbox import DELIVERED_INTERVAL_S
from services.kit.wire import write
from services.pacing.deposit import due_times_s, release_interval_s

SAMPLES_PER_S = 2.0
DRAIN_TIMEOUT_S = 300.0  # after the last arrival


class RunError(Exception):
    """A run that says nothing about its system but that it failed."""


@dataclass(slots=True)
class Replayed:
    """What came of a trace."""

    requests: list[RequestRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


async def replay(address: str, trace: Sequence[TracedRequest]) -> Replayed:
    """Send a trace and wait until all of it is answered."""
    result = Replayed()
    intervals_s = {request.request_id: release_interval_s(request.level) for request in trace}
    async with GatewayStream(address, gateway_id="bench") as stream:
        began_s = time.monotonic()
        background = [
            asyncio.create_task(_report_progress(stream, intervals_s)),
            asyncio.create_task(_sample(stream, began_s, result.samples)),
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                sent = [tasks.create_task(_ask(stream, request, began_s)) for request in trace]
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)
        for task in background:
            if not task.cancelled() and (error := task.exception()):
                raise error
    result.requests = [task.result() for task in sent]
    return result


async def warm(address: str, trace: Sequence[TracedRequest]) -> None:
    """Run requests that are not measured: a new engine's first steps tell nothing.

    Raises RunError where one fails.
    """
    replayed = await replay(address, trace)
    if failed := [r.failure for r in replayed.requests if r.failure]:
        raise RunError(f"{len(failed)} requests of the warm-up failed: {failed[0]}")


async def _ask(stream: GatewayStream, request: TracedRequest, began_s: float) -> RequestRecord:
    await asyncio.sleep(began_s + request.arrival_s - time.monotonic())
    submitted_s = time.monotonic()
    answer = await stream.submit(
        request.request_id,
        token_ids=gen.TokenIds(ids=request.prompt()),
        sampling={"temperature": 0, "max_tokens": request.num_output_tokens},
        service_level=write(request.level, gen.ServiceLevel),
    )
    waiting = asyncio.create_task(answer.done.wait())
    leaving = asyncio.create_task(_leave(stream, answer, request))
    await asyncio.wait(
        [waiting, stream.reader],
        timeout=DRAIN_TIMEOUT_S,
        return_when=asyncio.FIRST_COMPLETED,
    )
    waiting.cancel()
    leaving.cancel()
    return RequestRecord(
        request_id=request.request_id,
        submitted_s=submitted_s - began_s,
        num_prompt_tokens=request.num_prompt_tokens,
        generated_s=tuple(t - began_s for t in answer.arrived_s),
        failure=_failure(answer, request),
        num_output_tokens=request.num_output_tokens,
        leaves_after=request.leaves_after,
        token_ids=tuple(answer.ids),
        level=request.level,
    )


async def _leave(stream: GatewayStream, answer: Answer, request: TracedRequest) -> None:
    """Abort a request when its reader has the last token that it stays for."""
    if request.leaves_after is None:
        return
    await stream.has_tokens(answer, request.leaves_after)
    interval_s = release_interval_s(request.level)
    due_s = due_times_s(answer.arrived_s[: request.leaves_after], interval_s)[-1]
    await asyncio.sleep(due_s - time.monotonic())
    await stream.abort(answer, request.request_id)


def _failure(answer: Answer, request: TracedRequest) -> str:
    if answer.rejected is not None:
        return f"rejected: {answer.rejected.message}"
    if not answer.done.is_set():
        return "no end in time"
    if answer.ending is not None and answer.ending.WhichOneof("how") == "failure":
        return answer.ending.failure.message
    missing = (request.leaves_after or request.num_output_tokens) - len(answer.tokens)
    return f"{missing} tokens short" if missing > 0 else ""


async def _report_progress(stream: GatewayStream, intervals_s: Mapping[str, float]) -> None:
    """Tell the executor how far the readers are, until cancelled."""
    told: dict[str, int] = {}
    while True:
        await asyncio.sleep(DELIVERED_INTERVAL_S)
        now_s = time.monotonic()
        counts = []
        for request_id, answer in list(stream.answers.items()):
            if answer.done.is_set() or told.get(request_id) == len(answer.tokens):
                continue
            due_s = due_times_s(answer.arrived_s, intervals_s[request_id])
            num = bisect_right(due_s, now_s)
            if num > told.get(request_id, 0):
                told[request_id] = num
                counts.append(pb.DeliveredCount(request_id=request_id, num_delivered_tokens=num))
        if counts:
            await stream.send(delivered=pb.Delivered(counts=counts))


async def _sample(stream: GatewayStream, began_s: float, samples: list[Sample]) -> None:
    request = pb.WatchRequestsRequest(max_updates_per_s=SAMPLES_PER_S)
    async for update in stream.stub.WatchRequests(request):
        groups = [r for request in update.requests for r in request.residency]
        held = (pb.REQUEST_STATE_PAUSED, pb.REQUEST_STATE_PARKED)
        samples.append(
            Sample(
                time_s=time.monotonic() - began_s,
                pool_used_frac=1 - update.num_free_pool_blocks / max(1, update.num_pool_blocks),
                offloaded_frac=sum(r != pb.RESIDENCY_RESIDENT for r in groups)
                / max(1, len(groups)),
                num_requests=len(update.requests),
                num_held=sum(r.state in held for r in update.requests),
            )
        )
