"""Figures of a system from its runs, as docs and tables name them. Pure."""

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from bench.e2e.records import RequestRecord, RunRecord
from services.pacing.attainment import (
    DELIVERY_TOLERANCE_S,
    ROUNDING_S,
    meets_tpot,
    violates_delivered_tbt,
)
from services.pacing.deposit import due_times_s
from services.pacing.reading import (
    EFFECTIVE,
    QOS,
    REBUFFERING,
    Reading,
    effective_of,
    reading_of,
)
from simulator.report.figures import waste

NUM_RESAMPLES = 1_000
INTERVAL_FRAC = 0.95
MIN_REQUESTS = 60  # of a run that counts
MIN_OUTPUT_TOKENS = 6_000
MIN_SEEDS = 3

DEFINITIONS = {
    "tbt": "share of gaps between tokens of a request, as generated (pauses, other requests' "
    f"prefills and preemptions included), of at most S + {DELIVERY_TOLERANCE_S * 1e3:g} ms",
    "tbt_deposit": "share of tokens generated no later than d_{k-1} + S + "
    f"{DELIVERY_TOLERANCE_S * 1e3:g} ms, d_k = max(g_k, d_{{k-1}} + S): what a reader behind the "
    "gateway's deposit gets",
    "tpot": "share of requests whose mean time per token after the first is at most S, as "
    "generated",
    "tpot_deposit": "the same with every token at its due time",
    "rebuffering": REBUFFERING,
    "p95_s, p99_s": "quantiles of the generated gaps, in seconds",
    "ttft_s, ttft_p50_s, ttft_p95_s, ttft_p99_s": "time from submit to the first token, which is "
    "the answer's, for nothing is thought here; mean and quantiles over requests, in seconds",
    "ttft_paced_s, ttft_unpaced_s": "its mean over requests that state an SLO, and over the others",
    "e2e_s": "mean time from submit to the last token, in seconds",
    "tokens_per_s": "output tokens of a run / time from its first submit to its last token",
    "unread": "share of the generated tokens that are behind the point at which their reader left",
    "unmade": "share of the tokens asked for that were not generated: their reader had left",
    "read_tokens_per_s": "generated tokens that were read, per second of the same time",
    "effective_tokens_per_s": f"{EFFECTIVE}; per second of the same time",
    "qos": f"{QOS}; per second of the same time",
    "requests_per_min": "requests of a run / the same time",
    "pool": "mean used share of the KV pool while requests were live",
    "offloaded": "mean share of layer groups in host memory while requests were live",
    "held": "mean number of paused or parked requests",
    "tokens_per_step": "tokens that a step brings a request that decodes, mean",
    "lambda": "bytes that the link moves in a base SLO / bytes of the KV pool",
    "mape": "mean of |predicted - measured| / mean measured, over the decode steps that the "
    "controller predicted",
    "mape_prompts": "the same, over the steps with part of a prompt, without waits for copies",
    "controller": "the controller's share of step time, on the engine's thread",
    "runs": "a system whose plans do not depend on the SLO runs once per seed; its requests are "
    "measured against the SLO of every scale",
    "interval": f"{INTERVAL_FRAC:.0%}, by {NUM_RESAMPLES} bootstrap samples of requests",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFigures:
    """One request against its SLO; without one, what counts tokens in time says nothing."""

    gaps_s: tuple[float, ...]
    num_in_time: int  # gaps within the SLO as generated
    num_in_time_deposit: int
    tpot_met: bool | None  # None below two tokens
    tpot_met_deposit: bool | None
    reading: Reading | None  # behind the deposit; None: it stated no SLO
    ttft_s: float
    e2e_s: float


def request_figures(request: RequestRecord, slo_s: float) -> RequestFigures:
    """Measure one request that produced at least one token. `slo_s` 0: it stated none."""
    generated_s = request.read_s
    left = len(request.generated_s) < request.num_output_tokens
    due_s = due_times_s(generated_s, slo_s, flushed_s=inf if left else request.generated_s[-1])
    return RequestFigures(
        gaps_s=tuple(b - a for a, b in pairwise(generated_s)),
        num_in_time=sum(not violates_delivered_tbt(b, a, slo_s) for a, b in pairwise(generated_s)),
        num_in_time_deposit=sum(
            not violates_delivered_tbt(g, d, slo_s)
            for d, g in zip(due_times_s(generated_s, slo_s), generated_s[1:], strict=False)
        ),
        tpot_met=_meets(generated_s, slo_s),
        tpot_met_deposit=_meets(due_s, slo_s),
        reading=reading_of(generated_s, slo_s) if slo_s else None,
        ttft_s=generated_s[0] - request.submitted_s,
        e2e_s=request.generated_s[-1] - request.submitted_s,
    )


def _meets(written_s: Sequence[float], slo_s: float) -> bool | None:
    if len(written_s) < 2:
        return None
    elapsed_s = written_s[-1] - written_s[0]
    return meets_tpot(elapsed_s, len(written_s) - 1, slo_s, tolerance_s=ROUNDING_S)


Sampled = Sequence[RequestFigures]


def _ttft_s(requests: Sampled) -> float:
    return statistics.fmean(request.ttft_s for request in requests)


# Over requests that state an SLO, and over all.
OF_PACED: Mapping[str, Callable[[Sampled], float]] = {
    "tbt": lambda rs: share((r.num_in_time, len(r.gaps_s)) for r in rs),
    "tbt_deposit": lambda rs: share((r.num_in_time_deposit, len(r.gaps_s)) for r in rs),
    "tpot": lambda rs: share((r.tpot_met, 1) for r in rs if r.tpot_met is not None),
    "tpot_deposit": lambda rs: share(
        (r.tpot_met_deposit, 1) for r in rs if r.tpot_met_deposit is not None
    ),
    "rebuffering": lambda rs: _rebuffering([r.reading for r in rs if r.reading]),
}
OF_ALL: Mapping[str, Callable[[Sampled], float]] = {
    "p95_s": lambda rs: quantile([gap for r in rs for gap in r.gaps_s], 0.95),
    "p99_s": lambda rs: quantile([gap for r in rs for gap in r.gaps_s], 0.99),
    "ttft_s": _ttft_s,
    "ttft_p50_s": lambda rs: quantile([r.ttft_s for r in rs], 0.5),
    "ttft_p95_s": lambda rs: quantile([r.ttft_s for r in rs], 0.95),
    "ttft_p99_s": lambda rs: quantile([r.ttft_s for r in rs], 0.99),
    "e2e_s": lambda rs: statistics.fmean(r.e2e_s for r in rs),
}


def share(parts: Iterable[tuple[float, float]]) -> float:
    """Return sum of the first numbers / sum of the second; 1 for nothing at all."""
    met, total = (sum(column) for column in zip(*parts, (0, 0), strict=False))
    return met / total if total else 1.0


def _rebuffering(readings: Sequence[Reading]) -> float:
    reading_s = sum(reading.reading_s for reading in readings)
    return sum(reading.waited_s for reading in readings) / reading_s if reading_s else 0.0


def quantile(values: Sequence[float], frac: float) -> float:
    """Return the value that `frac` of all values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(frac * len(ordered)))] if ordered else 0.0


def estimates(runs: Sequence[RunRecord], *, seed: int = 0) -> dict[str, Estimate]:
    """Return the per-request figures over all runs of one system, SLO and kind of readers."""
    requests = [
        request_figures(r, slo_s)
        for run in runs
        for r, slo_s in zip(run.requests, run.slos_s, strict=True)
        if r.generated_s
    ]
    paced = [r for r in requests if r.reading]
    unpaced = [r for r in requests if not r.reading]
    found = _bootstrapped(OF_PACED, paced, seed) | _bootstrapped(OF_ALL, requests, seed)
    if paced and unpaced:
        found |= _bootstrapped({"ttft_paced_s": _ttft_s}, paced, seed)
        found |= _bootstrapped({"ttft_unpaced_s": _ttft_s}, unpaced, seed)
    return found


def _bootstrapped(
    figures: Mapping[str, Callable[[Sampled], float]], requests: Sampled, seed: int
) -> dict[str, Estimate]:
    """Return each figure of these requests; none without requests."""
    if not requests:
        return {}
    rng = random.Random(seed)
    resamples = [rng.choices(requests, k=len(requests)) for _ in range(NUM_RESAMPLES)]
    tail = (1 - INTERVAL_FRAC) / 2
    found = {}
    for name, figure in figures.items():
        values = [figure(sample) for sample in resamples]
        found[name] = Estimate(
            value=figure(requests), low=quantile(values, tail), high=quantile(values, 1 - tail)
        )
    return found


def run_figures(run: RunRecord) -> dict[str, float]:
    """Return what a run gives only as a whole."""
    done = [r for r in run.requests if r.generated_s]
    figures = {"failed": float(sum(bool(r.failure) for r in run.requests))}
    if done:
        seconds = max(r.generated_s[-1] for r in done) - min(r.submitted_s for r in run.requests)
        figures["tokens_per_s"] = sum(len(r.generated_s) for r in done) / seconds
        figures["requests_per_min"] = 60 * len(done) / seconds
        if run.key.leaving:
            figures |= waste(done, seconds)
        if all(run.slos_s):
            effective, missed = _effective_and_missed(run)
            figures["effective_tokens_per_s"] = effective / seconds
            figures["qos"] = (effective - missed) / seconds
    if busy := [s for s in run.samples if s.num_requests]:
        figures["pool"] = statistics.fmean(s.pool_used_frac for s in busy)
        figures["offloaded"] = statistics.fmean(s.offloaded_frac for s in busy)
        figures["held"] = statistics.fmean(s.num_held for s in busy)
    if run.key.num_drafts and (decodes := run.sums.get("controller_num_decodes")):
        figures["tokens_per_step"] = run.sums["controller_num_decoded_tokens"] / decodes
    if measured := run.sums.get("controller_measured_step_s"):
        figures["mape"] = run.sums["controller_abs_error_s"] / measured
    if measured := run.sums.get("controller_measured_prompt_step_s"):
        figures["mape_prompts"] = run.sums["controller_prompt_abs_error_s"] / measured
    if step_s := run.sums.get("controller_step_s"):
        figures["controller"] = run.sums["controller_controller_s"] / step_s
    return figures


def _effective_and_missed(run: RunRecord) -> tuple[float, float]:
    """Return tokens that count, and those that readers would have read while they waited."""
    effective = missed = 0.0
    for one, slo_s in zip(run.requests, run.slos_s, strict=True):
        if one.generated_s:
            waited_s = reading_of(one.read_s, slo_s).waited_s
            effective += effective_of(one.read_s, slo_s)
            missed += (one.generated_s[0] - one.submitted_s + waited_s) / slo_s
    return effective, missed


def why_not_counted(runs: Sequence[RunRecord]) -> list[str]:
    """Return what a system's runs lack to count; nothing if they do."""
    reasons = []
    if len({run.key.seed for run in runs}) < MIN_SEEDS:
        reasons.append(f"fewer than {MIN_SEEDS} seeds")
    if any(len(run.requests) < MIN_REQUESTS for run in runs):
        reasons.append(f"a run of fewer than {MIN_REQUESTS} requests")
    if any(sum(len(r.generated_s) for r in run.requests) < MIN_OUTPUT_TOKENS for run in runs):
        reasons.append(f"a run of fewer than {MIN_OUTPUT_TOKENS} output tokens")
    return reasons
