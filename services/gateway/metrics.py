"""What the gateway counts and times."""

from bisect import bisect_left
from collections.abc import Iterator
from enum import Enum
from itertools import accumulate, product

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.gateway.request_class import RequestClass
from services.pacing.cause import Cause

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_TBT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 5)
_WAIT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)

TTFT_SECONDS = Histogram(
    "evenflow_ttft_seconds",
    "Time from a request's arrival to its first token's hand-over to the client.",
    buckets=_TTFT_BUCKETS_S,
)
TTFAT_SECONDS = Histogram(
    "evenflow_ttfat_seconds",
    "Time from a request's arrival to the hand-over of the first token of its answer: of text or "
    "of a call, after what the model thinks.",
    buckets=_TTFT_BUCKETS_S,
)
TPOT_SECONDS = Histogram(
    "evenflow_delivered_tpot_seconds",
    "Mean time per token after the first of one request's answer, as written to the client.",
    buckets=_TBT_BUCKETS_S,
)
PACED_REQUESTS = Counter(
    "evenflow_paced_requests_total",
    "Complete answers with a release interval, by whether it was their mean time per output token "
    "after the first, at most.",
    ["tpot"],
)
LONGEST_GAP_SECONDS = Histogram(
    "evenflow_longest_gap_seconds",
    "Longest gap between two tokens of one complete answer, as they were written to the client, by "
    "what keeps tokens back.",
    ["release"],
    buckets=_WAIT_BUCKETS_S,
)
UNREAD_TOKENS = Counter(
    "evenflow_unread_tokens_total",
    "Tokens that clients had and by their pace had not read when they left.",
)
READ_FRAC = Histogram(
    "evenflow_abandoned_read_frac",
    "Share of the text generated so far that was read, by its pace, of answers whose clients left.",
    buckets=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1),
)
CLASS_TTFT_SECONDS = Histogram(
    "evenflow_class_ttft_seconds",
    "Time from a request's arrival to its first token, by the request's class: as handed over to "
    "the client, or as made if the answer is given as a whole.",
    ["class"],
    buckets=_TTFT_BUCKETS_S,
)
CLASS_WAIT_SECONDS = Histogram(
    "evenflow_class_wait_seconds",
    "Longest time that one complete answer stood still after its first token, by the request's "
    "class: without a new token, or beyond its reader's pace if it has one.",
    ["class"],
    buckets=_WAIT_BUCKETS_S,
)
REASONING_TOKENS = Counter(
    "evenflow_reasoning_tokens_total",
    "Tokens of complete answers that the model thought, told or not, but for those that the client "
    "had sent with its request.",
)
CONTENT_TOKENS = Counter(
    "evenflow_content_tokens_total",
    "All other tokens of complete answers, text and calls, but for those that the client had sent.",
)
HOLDS = Counter(
    "evenflow_gateway_holds_total", "Times that generation was held because its reader lagged."
)
MOVES = Counter(
    "evenflow_gateway_moves_total",
    "Requests that lost their executor, by why, and by what became of them: continued, begun "
    "again, or ended with an error.",
    ["cause", "result"],
)
MOVE_GAP_SECONDS = Histogram(
    "evenflow_gateway_move_gap_seconds",
    "Time from the loss of a request's executor to its next token from the next one.",
    buckets=_WAIT_BUCKETS_S,
)
MOVES_HIDDEN = Counter(
    "evenflow_gateway_moves_hidden_total",
    "Such gaps of streams that were over before their readers had read what was there.",
)
STREAM_RETURNS = Counter(
    "evenflow_gateway_stream_returns_total", "Times that a resumable stream was taken up again."
)
STREAMS_LET_GO = Counter(
    "evenflow_gateway_streams_let_go_total",
    "Resumable streams that were given up before they had been read, because their readers stayed "
    "away, or for want of memory.",
    ["reason"],
)
DETACHED_STREAMS = Gauge(
    "evenflow_gateway_detached_streams", "Resumable streams that are not over and not read."
)
KEPT_STREAM_BYTES = Gauge(
    "evenflow_gateway_kept_stream_bytes", "Memory that tokens of resumable streams take, about."
)
LIVE_REQUESTS = Gauge("evenflow_gateway_live_requests", "Requests that are not finished.")
REQUESTS = Counter("evenflow_gateway_requests_total", "Requests that ended, by how.", ["result"])
KEY_TOKENS = Counter(
    "evenflow_gateway_key_tokens_total",
    "Tokens of ended requests, by the API key's name, prompt and output apart.",
    ["api_key", "kind"],
)
HTTP_SECONDS = Histogram(
    "evenflow_http_request_duration_seconds",
    "Duration of HTTP requests; streams count until they end.",
    ["route", "status"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)


class Slo(Enum):
    """What was promised: of a request, or of each of its tokens after the first."""

    __hash__ = object.__hash__  # as a `Cause`'s

    TTFT = "ttft"
    TPOT = "tpot"
    TBT = "tbt"  # the release interval behind the deposit, whatever it follows from


class DeliveredTokens(Collector):
    """What is counted of every token, on the event loop's thread alone. The library's own metrics
    take a lock for each change, which would be the dearest step on a token's way.
    """

    def __init__(self) -> None:
        self.num_written = dict.fromkeys(RequestClass, 0)
        self.num_paced = 0
        self.num_effective = 0.0
        self.num_missed = 0.0
        self.reading_s = 0.0
        self.rebuffering_s = dict.fromkeys(Cause, 0.0)
        self._num_misses = dict.fromkeys(product(Slo, Cause), 0)
        self._num_gaps = [0] * (len(_TBT_BUCKETS_S) + 1)  # by the bucket they belong to
        self._gap_sum_s = 0.0

    def note_miss(self, slo: Slo, cause: Cause) -> None:
        """Count a promise that was not kept."""
        self._num_misses[slo, cause] += 1

    def note_gap(self, gap_s: float) -> None:
        """Take in the time between two tokens of one request."""
        self._num_gaps[bisect_left(_TBT_BUCKETS_S, gap_s)] += 1
        self._gap_sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, for a scrape."""
        yield CounterMetricFamily(
            "evenflow_delivered_tokens",
            "Tokens written to clients.",
            sum(self.num_written.values()),
        )
        by_class = CounterMetricFamily(
            "evenflow_class_tokens",
            "Tokens written to clients, by the request's class.",
            labels=["class"],
        )
        for kind, number in self.num_written.items():
            by_class.add_metric([kind.value], number)
        yield by_class
        yield CounterMetricFamily(
            "evenflow_paced_tokens",
            "Tokens after the first of streams with a release interval.",
            self.num_paced,
        )
        yield CounterMetricFamily(
            "evenflow_effective_tokens",
            "Tokens of complete answers, weighted by what their readers had in hand.",
            self.num_effective,
        )
        yield CounterMetricFamily(
            "evenflow_missed_tokens",
            "Tokens that readers with a pace would have read while they waited, for the first "
            "token or later: effective ones less these are TokenFlow's QoS.",
            self.num_missed,
        )
        yield CounterMetricFamily(
            "evenflow_reading_seconds", "Intervals of paced tokens, summed.", self.reading_s
        )
        yield from self._losses()
        bounds = [*map(floatToGoString, _TBT_BUCKETS_S), "+Inf"]
        yield HistogramMetricFamily(
            "evenflow_delivered_tbt_seconds",
            "Gap between two tokens of one request as they were written to the client.",
            buckets=list(zip(bounds, accumulate(self._num_gaps), strict=True)),
            sum_value=self._gap_sum_s,
        )

    def _losses(self) -> Iterator[Metric]:
        """Yield what readers did not get, each by its cause."""
        rebuffering = CounterMetricFamily(
            "evenflow_rebuffering_seconds",
            "Time that readers of paced tokens waited beyond their pace.",
            labels=["cause"],
        )
        for cause, seconds in self.rebuffering_s.items():
            rebuffering.add_metric([cause.value], seconds)
        misses = CounterMetricFamily(
            "evenflow_slo_misses",
            "First tokens of answers later than their bound, answers with a longer mean time per "
            "token, and paced tokens written later than the previous due time + interval + 5 ms.",
            labels=["slo", "cause"],
        )
        for (slo, cause), number in self._num_misses.items():
            misses.add_metric([slo.value, cause.value], number)
        yield from (rebuffering, misses)


for kind in RequestClass:  # each has its figures from the beginning
    for histogram in (CLASS_TTFT_SECONDS, CLASS_WAIT_SECONDS):
        histogram.labels(kind.value)
DELIVERED = DeliveredTokens()
REGISTRY.register(DELIVERED)
