"""What the executor counts. vLLM's own metrics appear on the same endpoint, unchanged."""

from prometheus_client import Counter, Gauge, Histogram

FRAMES = Counter("evenflow_executor_frames_total", "Messages sent to gateways.")
FRAME_TOKENS = Histogram(
    "evenflow_executor_frame_tokens",
    "Output tokens per message to a gateway.",
    buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
)
LIVE_REQUESTS = Gauge(
    "evenflow_executor_live_requests", "Requests submitted and not yet ended or refused."
)
DEPOSITED_TOKENS = Gauge(
    "evenflow_executor_deposited_tokens",
    "Tokens generated and not yet delivered, over all live requests.",
)
ORPHANS = Counter(
    "evenflow_executor_orphaned_requests_total",
    "Requests let go of because one side only had them: the gateways' sessions, or the engine.",
    ["side"],
)
for side in ("sessions", "engine"):
    ORPHANS.labels(side)  # 0 from the start
REQUESTS = Counter(
    "evenflow_executor_requests_total",
    "Requests answered, by how they ended or why they were refused.",
    ["result"],
)
RETURNED_TOKENS = Counter(
    "evenflow_executor_returned_tokens_total",
    "Tokens with which requests came in that were preempted, or begun elsewhere; by whether a "
    "cache had their KV.",
    ["result"],
)
for result in ("found", "computed"):
    RETURNED_TOKENS.labels(result)  # 0 from the start
NEXT_PREFIXES = Counter(
    "evenflow_executor_next_prefixes_total",
    "Beginnings of next turns that clients asked for ahead: computed, or dropped for other work.",
    ["result"],
)
TOOL_WAITS = Histogram(
    "evenflow_executor_tool_wait_seconds",
    "Time from an answer with a tool call to the request with its result, by tool.",
    ["tool"],
    buckets=(0.1, 0.3, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600),
)
STREAMS = Gauge("evenflow_executor_gateway_streams", "Open streams of gateways.")
