"""What the gateway counts and times."""

from prometheus_client import Counter, Gauge, Histogram

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_TBT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 5)

TTFT_SECONDS = Histogram(
    "evenflow_ttft_seconds",
    "Time from a request's arrival to its first token's hand-over to the client.",
    buckets=_TTFT_BUCKETS_S,
)
DELIVERED_TBT_SECONDS = Histogram(
    "evenflow_delivered_tbt_seconds",
    "Gap between two tokens of one request as they were written to the client.",
    buckets=_TBT_BUCKETS_S,
)
TPOT_SECONDS = Histogram(
    "evenflow_delivered_tpot_seconds",
    "Mean time per output token after the first of one request, as written to the client.",
    buckets=_TBT_BUCKETS_S,
)
DELIVERED_TOKENS = Counter("evenflow_delivered_tokens_total", "Tokens written to clients.")
PACED_TOKENS = Counter(
    "evenflow_paced_tokens_total", "Tokens after the first of streams with a release interval."
)
LATE_TOKENS = Counter(
    "evenflow_delivered_tbt_violations_total",
    "Paced tokens written later than the previous due time + interval + 5 ms.",
)
SLO_VIOLATIONS = Counter(
    "evenflow_request_slo_violations_total", "Requests that missed a bound they stated.", ["type"]
)
HOLDS = Counter(
    "evenflow_gateway_holds_total", "Times that generation was held because its reader lagged."
)
LIVE_REQUESTS = Gauge("evenflow_gateway_live_requests", "Requests that are not finished.")
REQUESTS = Counter("evenflow_gateway_requests_total", "Requests that ended, by how.", ["result"])
HTTP_SECONDS = Histogram(
    "evenflow_http_request_duration_seconds",
    "Duration of HTTP requests; streams count until they end.",
    ["route", "status"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
