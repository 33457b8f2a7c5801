"""What engines do, passed on to clients that watch; without one no executor is asked."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from evenflow.executor.v1 import executor_pb2 as pb
from services.gateway.errors import TooManyRequestsError
from services.gateway.executors.kv_holders import KVHolders, kv_holders
from services.gateway.executors.link import ExecutorLink
from services.generation.convert import CAUSE_FROM_PROTO
from services.kit.errors import ServiceError
from services.kit.rpc import name_of_request

MAX_WATCHERS = 16  # at a time: each has every engine describe itself for it
RETRY_S = 0.5  # until an executor that is gone is looked for again
_STATES = MappingProxyType(
    {value: name.removeprefix("REQUEST_STATE_").lower() for name, value in pb.RequestState.items()}
)
_PLACES = MappingProxyType(  # one letter per layer group, for there are many
    {pb.RESIDENCY_RESIDENT: "R", pb.RESIDENCY_OFFLOADED: "O", pb.RESIDENCY_RESTORING: "B"}
)

Send: TypeAlias = Callable[[bytes], Awaitable[None]]


class Watches:
    """Follows all executors for each watcher."""

    def __init__(
        self, links: Mapping[str, ExecutorLink], *, is_leaving: Callable[[], bool]
    ) -> None:
        """`links`, by address, come and go. Watches end when `is_leaving` says so."""
        self._links = links
        self._is_leaving = is_leaving
        self._num_watchers = 0

    def check_room(self) -> None:
        """Raise TooManyRequestsError if one more may not watch now."""
        if self._num_watchers >= MAX_WATCHERS:
            raise TooManyRequestsError(limit=MAX_WATCHERS, num_free=0)

    async def relay(self, send: Send, *, max_updates_per_s: float) -> None:
        """Send each executor's updates as JSON, and at once that one is not connected, until the
        gateway leaves. `send` may take its time: updates are then fewer.
        """
        self._num_watchers += 1
        try:
            async with asyncio.TaskGroup() as tasks:
                followed = set[ExecutorLink]()
                while not self._is_leaving():
                    links = set(self._links.values())
                    for link in followed - links:  # its calls were cancelled with its channel
                        followed.remove(link)
                        await send(_not_connected(link.address))
                    for link in links - followed:
                        tasks.create_task(self._follow(link, send, max_updates_per_s))
                        followed.add(link)
                    await asyncio.sleep(RETRY_S)
        finally:
            self._num_watchers -= 1

    async def kv_holders(self, limit: int) -> KVHolders:
        """Return what holds the KV of all executors, as JSON, at most `limit` entries of a kind.
        One that does not answer is told as not connected. Counts as a watcher meanwhile.
        """
        self._num_watchers += 1
        try:
            links = list(self._links.values())
            calls = [link.kv_holders(limit) for link in links]
            answers = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            self._num_watchers -= 1
        told: dict[str, pb.GetKVHoldersResponse | None] = {}
        for link, answer in zip(links, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, ServiceError):
                raise answer
            told[link.address] = None if isinstance(answer, BaseException) else answer
        return kv_holders(told, limit=limit)

    async def _follow(self, link: ExecutorLink, send: Send, max_updates_per_s: float) -> None:
        while not self._is_leaving() and self._links.get(link.address) is link:
            with suppress(ServiceError):
                async for update in link.watch(max_updates_per_s):
                    info = link.info
                    await send(engine_update(link.address, info.model if info else "", update))
                    if self._is_leaving():
                        return
            await send(_not_connected(link.address))
            await asyncio.sleep(RETRY_S)


def _not_connected(address: str) -> bytes:
    return msgspec.json.encode({"executor": address, "is_connected": False})


def engine_update(executor: str, model: str, update: pb.WatchRequestsResponse) -> bytes:
    """Return an update as JSON, in the names of the executor's contract; where KV is, is a letter
    per layer group: R in the pool, O on the host, B on its way back.
    """
    has_prediction = update.HasField("predicted_step_s")
    has_link = update.HasField("link_bytes_per_s")
    drafts = update.HasField("tokens_per_step")
    told: dict[str, Any] = {
        "executor": executor,
        "is_connected": True,
        "model": model,
        "num_steps": update.num_steps,
        "observed_step_s": update.observed_step_s,
        "predicted_step_s": update.predicted_step_s if has_prediction else None,
        "num_pool_blocks": update.num_pool_blocks,
        "num_free_pool_blocks": update.num_free_pool_blocks,
        "num_host_blocks": update.num_host_blocks,
        "num_free_host_blocks": update.num_free_host_blocks,
        "link_bytes_per_s": update.link_bytes_per_s if has_link else None,
        "tokens_per_step": update.tokens_per_step if drafts else None,
        "num_cached_tokens": update.num_cached_tokens,
        "requests": [_request(request) for request in update.requests],
        "prefixes": [
            {
                "request_ids": list(map(name_of_request, prefix.request_ids)),
                "num_tokens": prefix.num_tokens,
                "residency": _letters(prefix.residency),
            }
            for prefix in update.prefixes
        ],
    }
    return msgspec.json.encode(told)


def _request(request: pb.ObservedRequest) -> dict[str, Any]:
    cause = CAUSE_FROM_PROTO.get(request.late_cause) if request.HasField("late_cause") else None
    return {
        "request_id": name_of_request(request.request_id),
        "state": _STATES.get(request.state, "unknown"),
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_generated_tokens": request.num_generated_tokens,
        "num_delivered_tokens": request.num_delivered_tokens,
        "num_deposited_tokens": request.num_deposited_tokens,
        "num_late_tokens": request.num_late_tokens,
        "release_interval_s": request.release_interval_s,
        "residency": _letters(request.residency),
        "late_cause": cause and cause.value,
        "why": request.why,
        "why_text": request.why_text,
    }


def _letters(residency: Sequence["pb.Residency.ValueType"]) -> str:
    return "".join([_PLACES.get(place, "?") for place in residency])
