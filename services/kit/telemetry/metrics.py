"""Prometheus metrics that every service has, and the endpoint that shows them."""

import socket
import threading
from http.server import ThreadingHTTPServer

from prometheus_client import Counter, Histogram, MetricsHandler

RPC_SECONDS = Histogram(
    "evenflow_rpc_duration_seconds",
    "Duration of served RPCs; streams count until they end.",
    ["method", "code"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
RPC_ERRORS = Counter("evenflow_rpc_errors_total", "RPCs that failed, by reason.", ["reason"])


class _TextHandler(MetricsHandler):
    """Answers in Prometheus' text format, whatever is asked for: in OpenMetrics the library writes
    `vllm_…` for `vllm:…` to a Prometheus before 3.
    """

    def do_GET(self) -> None:  # noqa: N802
        del self.headers["Accept"]
        super().do_GET()


class _Server(ThreadingHTTPServer):
    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _TextHandler)


def start_endpoint(host: str, port: int) -> int:
    """Serve `/metrics` from a thread. Returns the port, which differs from `port` only for 0."""
    server = _Server(host, port)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server.server_port
