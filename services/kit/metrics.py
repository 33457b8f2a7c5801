"""Prometheus metrics that every service has, and the endpoint that shows them."""

from prometheus_client import Counter, Histogram, start_http_server

RPC_SECONDS = Histogram(
    "evenflow_rpc_duration_seconds",
    "Duration of served RPCs; streams count until they end.",
    ["method", "code"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
RPC_ERRORS = Counter("evenflow_rpc_errors_total", "RPCs that failed, by reason.", ["reason"])


def start_endpoint(host: str, port: int) -> int:
    """Serve `/metrics` from a thread. Returns the port, which differs from `port` only for 0."""
    server, _ = start_http_server(port, addr=host)
    return server.server_port
