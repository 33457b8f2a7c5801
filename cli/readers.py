"""Readers for vLLM's serving benchmark: what each was promised goes along with the request, and
when each of its tokens came is kept.
"""

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any

from cli.client.answer import Arrivals
from cli.client.endpoint import RefusedError
from cli.client.felt import Heard
from services.pacing.deposit import release_interval_s
from services.pacing.types import ServiceLevel

CHAT_BACKEND = "openai-chat"
# vLLM's request functions that speak the routes which Evenflow has, and these routes.
ENDPOINTS = {
    CHAT_BACKEND: "/v1/chat/completions",
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
}

RequestFunc = Callable[..., Awaitable[Any]]


class Readers:
    """Deals what readers are promised round-robin, and keeps what each heard."""

    def __init__(self, levels: Sequence[ServiceLevel], backend: str) -> None:
        """`levels` has at least one; `backend` is one of ENDPOINTS."""
        self._levels = cycle(levels)
        self._backend = backend
        self.heard: list[Heard] = []
        self.failures: list[str] = []  # what became of requests without an answer

    def reading(self, request_func: RequestFunc) -> RequestFunc:
        """Return one of vLLM's request functions with a reader for each request.

        Requests without an id are the benchmark's own checks and probes, which no reader reads.
        """

        async def read(request_func_input: Any, session: Any, pbar: Any = None) -> Any:
            if request_func_input.request_id is None:
                return await request_func(request_func_input, session, pbar)
            level, tap = next(self._levels), _Tap(session)
            output = await request_func(self._promised(request_func_input, level), tap, pbar)
            if tap.error:  # vLLM takes an answer that broke off for a whole one
                output.success, output.error = False, tap.error
            arrivals = tap.arrivals
            if output.success and arrivals.at_s:
                self.heard.append(
                    Heard(
                        level=level,
                        sent_s=output.start_time,
                        arrived_s=tuple(arrivals.at_s),
                        num_thoughts=arrivals.num_thoughts,
                        num_tokens=output.output_tokens or len(arrivals.at_s),
                    )
                )
            elif not output.success:
                self.failures.append((output.error.splitlines() or ["no tokens"])[-1])
            return output

        return read

    def _promised(self, request: Any, level: ServiceLevel) -> Any:
        """Return a request of vLLM's that tells the server what its reader was promised."""
        return replace(
            request,
            extra_headers={**(request.extra_headers or {}), **headers_of(level)},
            extra_body={**self._body(request, level), **(request.extra_body or {})},
        )

    def _body(self, request: Any, level: ServiceLevel) -> dict[str, object]:
        body: dict[str, object] = {}
        if level.pace_tail:
            body["evenflow"] = {"pace_tail": True}
        if release_interval_s(level) and request.logprobs is None:
            # With probabilities a token is told even if it has no text: each takes its turn, and
            # one that was not told would make the next one seem late.
            body["logprobs"] = True if self._backend == CHAT_BACKEND else 0
        return body


def headers_of(level: ServiceLevel) -> dict[str, str]:
    """Return a promise as the gateway reads it."""
    values = {
        "x-consumption-rate-tps": level.consumption_rate_tps,
        "x-slo-ttft-ms": _ms(level.slo_ttft_s),
        "x-slo-tpot-ms": _ms(level.slo_tpot_s),
        "x-slo-tbt-ms": _ms(level.slo_tbt_s),
    }
    return {name: f"{value:.12g}" for name, value in values.items() if value is not None}


@contextmanager
def readers_in_benchmark(
    readers: Readers, backend: str, report: Callable[[], dict[str, Any]]
) -> Iterator[None]:
    """While the block runs, vLLM's benchmark has these readers.

    What `report` returns when the benchmark has printed its table becomes "evenflow" of its result.
    """
    from vllm.benchmarks import serve

    request_func, benchmark = serve.ASYNC_REQUEST_FUNCS[backend], serve.benchmark

    async def benchmark_with_readers(**options: Any) -> dict[str, Any]:
        for number, request in enumerate(options["input_requests"]):
            request.request_id = request.request_id or f"bench-{number}"  # some data sets name none
        result: dict[str, Any] = await benchmark(**options)
        return {**result, "evenflow": report()}

    serve.ASYNC_REQUEST_FUNCS[backend] = readers.reading(request_func)
    serve.benchmark = benchmark_with_readers
    try:
        yield
    finally:
        serve.ASYNC_REQUEST_FUNCS[backend], serve.benchmark = request_func, benchmark


class _Tap:
    """Stands in for the session of one request, and notes what its response brings."""

    def __init__(self, session: Any) -> None:
        from vllm.benchmarks.lib.endpoint_request_func import StreamedResponseHandler

        self._session = session
        self._events = StreamedResponseHandler()
        self.arrivals = Arrivals()  # on time.perf_counter
        self.error = ""  # what the server said in place of an answer, or of its end

    @asynccontextmanager
    async def post(self, **options: Any) -> AsyncIterator[Any]:
        async with self._session.post(**options) as response:
            if response.status != 200:
                self.error = str(RefusedError(response.status, await response.text()))
            yield _TappedResponse(response, self._take)

    def _take(self, chunk: bytes) -> None:
        now_s = time.perf_counter()
        for message in self._events.add_chunk(chunk):
            data = message.removeprefix("data: ")
            if data in (message, "[DONE]"):
                continue
            event = json.loads(data)
            if "error" in event:
                self.error = str(event["error"]["message"])
            for choice in event.get("choices", ()):
                self.arrivals.take(choice, now_s)


class _TappedResponse:
    """A response that shows each chunk of its body to `take` on the way."""

    def __init__(self, response: Any, take: Callable[[bytes], None]) -> None:
        self._response = response
        self._take = take
        self.status = response.status
        self.reason = response.reason

    @property
    def content(self) -> "_TappedResponse":
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        async for chunk in self._response.content.iter_any():
            self._take(chunk)
            yield chunk


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
