"""A gRPC server's life: health, reflection, drain on SIGTERM."""

import asyncio
import signal
from collections.abc import Sequence

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from services.kit import clock
from services.kit.rpc import ServiceInterceptor
from services.kit.tls import server_credentials
from services.kit.transport import PLAIN, Certificates, Transport

log = structlog.get_logger()

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LAST_ANSWERS_S = 1.0  # for answers that are on their way when the last call ends


class ServiceServer:
    """One gRPC server with the standard health service and reflection.

    Health is NOT_SERVING until `mark_serving` says otherwise, and again from the start of `drain`.
    """

    def __init__(
        self,
        address: str,
        service_names: Sequence[str],
        *,
        transport: Transport = PLAIN,
        interceptors: Sequence[aio.ServerInterceptor] = (),
        max_calls: int | None = None,
    ) -> None:
        """Bind `address` ("host:port", port 0 picks one). Raises RuntimeError if it is taken.

        `interceptors` are asked after the service's own. Calls beyond `max_calls` at a time are
        refused with RESOURCE_EXHAUSTED, and wait at the client if they share a connection.
        """
        interceptor = ServiceInterceptor(client_names=transport.client_names)
        self._live_calls = interceptor.live_calls
        self.grpc = aio.server(
            interceptors=[interceptor, *interceptors],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", int(5e2 * transport.keepalive_s)),
                *([("grpc.max_concurrent_streams", max_calls)] if max_calls else []),
                *transport.ping_options,
            ],
            maximum_concurrent_rpcs=max_calls,
        )
        self._names = ("", *service_names)
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection(
            (
                *service_names,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                reflection.SERVICE_NAME,
            ),
            self.grpc,
        )
        self.port: int = self._bind(address, transport.certificates)

    def _bind(self, address: str, certificates: Certificates | None) -> int:
        if certificates is None:
            return int(self.grpc.add_insecure_port(address))
        return int(self.grpc.add_secure_port(address, server_credentials(certificates)))

    async def start(self) -> None:
        for name in self._names:
            await self._health.set(name, NOT_SERVING)
        await self.grpc.start()

    async def mark_serving(self, *, is_serving: bool = True) -> None:
        """Say whether calls would be served from now on; nothing is said once `drain` has begun."""
        for name in self._names:
            await self._health.set(name, SERVING if is_serving else NOT_SERVING)
        log.info("serving_started" if is_serving else "serving_interrupted", port=self.port)

    async def mark_leaving(self) -> None:
        """Say NOT_SERVING for good, and go on serving."""
        await self._health.enter_graceful_shutdown()

    async def drain(self, timeout_s: float) -> None:
        """Say NOT_SERVING, refuse new calls, let live ones end; cancel them after `timeout_s`."""
        await self.mark_leaving()
        log.info("drain_started", timeout_s=timeout_s)
        end_s = clock.monotonic_s() + timeout_s
        stopping = asyncio.create_task(self.grpc.stop(grace=timeout_s))
        idle = asyncio.create_task(self._live_calls.wait_idle())
        await asyncio.wait([stopping, idle], return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        # Health watches never end by themselves: they get only the time that last answers need.
        # Two stops whose time is up at the same moment crash grpc, so one of them must be early.
        if end_s - clock.monotonic_s() > 2 * LAST_ANSWERS_S:
            await self.grpc.stop(grace=LAST_ANSWERS_S)
        await stopping
        log.info("drain_finished")


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set. Call inside the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    return stop


async def run_until_stopped(
    server: ServiceServer, *, stop: asyncio.Event, drain_timeout_s: float
) -> None:
    """Serve until `stop` is set, then drain. The server must be started."""
    await server.mark_serving()
    await stop.wait()
    await server.drain(drain_timeout_s)
