"""Figures of a run, by the project's definitions."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Protocol

from services.pacing.attainment import (
    DELIVERY_TOLERANCE_S,
    ROUNDING_S,
    meets_tpot,
    tpot_s,
    violates_delivered_tbt,
)
from services.pacing.deposit import due_times_s, release_interval_s
from simulator.engine.records import Outcome, RunRecord
from simulator.report import streaming

DEFINITIONS: Mapping[str, str] = {
    "S": "1 / reading rate, else the TBT SLO, else the TPOT SLO of a request",
    "tbt": "share of tokens after the first that come at most S + "
    f"{DELIVERY_TOLERANCE_S * 1e3:g} ms after the one before, as generated: pauses, other "
    "requests' prompts and preemptions included",
    "tbt_deposit": "share of tokens after the first that are there by d_{k-1} + S + "
    f"{DELIVERY_TOLERANCE_S * 1e3:g} ms, d_k = max(g_k, d_{{k-1}} + S): behind Token-Deposit",
    "tpot": "share of requests whose mean time per token after the first is at most S, as "
    "generated",
    "tpot_deposit": "the same with every token at its due time",
    "step_tbt, step_tbt_deposit, step_tpot": "as OrbitFlow's artefact counts: a token takes "
    "as long as the step that made it; steps that compute a prompt are left out, and so is all "
    "time in which the request is not scheduled; without tolerance; for comparison only",
    "violations": "share of requests with a TTFT SLO that miss it or their TPOT SLO, as generated",
    "lambda": "bytes that the link moves in a resident decode step / bytes of the KV pool",
    "unread": "share of the generated tokens that are behind the point at which their reader left, "
    "where some readers leave",
    "unmade": "share of the tokens asked for that were not generated: their reader had left",
    "read_tokens_per_s": "generated tokens that were read, per second of the same time",
    "rejected": "requests larger than the engine can ever hold; all their tokens count as late",
    "p50_s, p95_s, p99_s": "quantiles of the generated gaps, in seconds",
    "tpot_p95_s, tpot_p99_s": "quantiles over requests of the mean time per token after the first",
    "ttft_s, ttft_p50_s, ttft_p95_s, ttft_p99_s": "from the arrival to the first token, mean and "
    "quantiles over requests, in seconds",
    **streaming.DEFINITIONS,
    "tokens_per_s, requests_per_min": "of complete requests, from the first arrival to the last "
    "token",
    "pool, host, offloaded, paused": "used share of the pool, of the host pool, share of running "
    "requests' layer groups on the host, number of paused requests; means over busy time",
    "stall": "share of busy time in which layers waited for copies",
    "prefill": "share of busy time in steps that compute a prompt",
    "plans_per_request": "questions to the placement policy / requests",
    "cached": "share of the prompts' tokens that were found, on the host or in the pool, and not "
    "computed",
    "duplicate": "share of the pool that would be free if live requests shared cached prefixes "
    "there, counted every 32 steps; mean over busy time",
    "found": "of the blocks that came back from the host, the share that the pool still had",
    "recomputed": "tokens of uncached KV that a step computes anew, mean over steps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Promptness:
    """One request against its own S."""

    num_gaps: int  # tokens after the first
    num_in_time: int
    num_in_time_deposit: int
    tpot_met: bool | None  # None below two tokens
    tpot_met_deposit: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPromptness:
    """One request's decode steps against its own S: see `DEFINITIONS`."""

    num_steps: int
    num_in_time: int
    num_in_time_deposit: int
    tpot_met: bool


def step_promptness(outcome: Outcome) -> StepPromptness | None:
    """Return how prompt a request's own decode steps were; None without any, or any promise."""
    interval_s = release_interval_s(outcome.level)
    if interval_s <= 0.0 or not outcome.decode_steps_s:
        return None
    generated_s = list(accumulate(outcome.decode_steps_s, initial=0.0))
    due_s = due_times_s(generated_s, interval_s)
    pairs = list(zip(due_s, generated_s[1:], strict=False))
    return StepPromptness(
        num_steps=len(pairs),
        num_in_time=sum(step_s <= interval_s for step_s in outcome.decode_steps_s),
        num_in_time_deposit=sum(
            not violates_delivered_tbt(g, d, interval_s, tolerance_s=0.0) for d, g in pairs
        ),
        tpot_met=generated_s[-1] / len(pairs) <= interval_s,
    )


def promptness(outcome: Outcome) -> Promptness | None:
    """Return how prompt one request was; None if it was promised nothing."""
    interval_s = release_interval_s(outcome.level)
    if interval_s <= 0.0:
        return None
    if outcome.rejected:
        num_gaps = outcome.num_output_tokens - 1
        met = False if num_gaps else None
        return Promptness(
            num_gaps=num_gaps,
            num_in_time=0,
            num_in_time_deposit=0,
            tpot_met=met,
            tpot_met_deposit=met,
        )
    generated_s = outcome.read_s
    due_s = due_times_s(generated_s, interval_s)
    written_s = delivered_s(outcome)[: len(generated_s)]
    return Promptness(
        num_gaps=len(generated_s) - 1,
        num_in_time=_num_in_time(generated_s[:-1], generated_s[1:], interval_s),
        num_in_time_deposit=_num_in_time(due_s[:-1], generated_s[1:], interval_s),
        tpot_met=_meets(generated_s, interval_s),
        tpot_met_deposit=_meets(written_s, interval_s),
    )


def delivered_s(outcome: Outcome) -> list[float]:
    """Return when each token reaches the reader behind the gateway's deposit."""
    generated_s, level = outcome.generated_s, outcome.level
    is_whole = len(generated_s) == outcome.num_output_tokens
    flushed_s = generated_s[-1] if is_whole and not level.pace_tail else inf
    return due_times_s(generated_s, release_interval_s(level), flushed_s=flushed_s)


def _num_in_time(before_s: Sequence[float], written_s: Sequence[float], interval_s: float) -> int:
    return sum(
        not violates_delivered_tbt(written, before, interval_s)
        for before, written in zip(before_s, written_s, strict=True)
    )


def _meets(written_s: Sequence[float], interval_s: float) -> bool | None:
    if len(written_s) < 2:
        return None
    elapsed_s = written_s[-1] - written_s[0]
    return meets_tpot(elapsed_s, len(written_s) - 1, interval_s, tolerance_s=ROUNDING_S)


def _violates(outcome: Outcome) -> bool:
    """Return whether a request misses its TTFT or its TPOT SLO, as generated."""
    level, generated_s = outcome.level, outcome.generated_s
    if not generated_s:
        return True
    late = generated_s[0] - outcome.arrival_s > (level.slo_ttft_s or inf)
    return late or (tpot_s(generated_s) or 0.0) > (level.slo_tpot_s or inf)


def figures(run: RunRecord) -> dict[str, float]:
    """Return every figure that the run has something to say about."""
    judged = [one for outcome in run.outcomes if (one := promptness(outcome)) is not None]
    done = [outcome for outcome in run.outcomes if outcome.generated_s]
    found: dict[str, float] = {
        "requests": len(run.outcomes),
        "rejected": sum(outcome.rejected for outcome in run.outcomes),
    }
    if judged:
        found["tbt"] = _share((r.num_in_time, r.num_gaps) for r in judged)
        found["tbt_deposit"] = _share((r.num_in_time_deposit, r.num_gaps) for r in judged)
        tpots = [(r.tpot_met, r.tpot_met_deposit) for r in judged if r.tpot_met is not None]
        found["tpot"] = _share((bool(met), 1) for met, _ in tpots)
        found["tpot_deposit"] = _share((bool(met), 1) for _, met in tpots)
    steps = [own for outcome in run.outcomes if (own := step_promptness(outcome)) is not None]
    if promised := [outcome for outcome in run.outcomes if outcome.level.slo_ttft_s]:
        found["violations"] = _share((_violates(outcome), 1) for outcome in promised)
    if steps:
        found["step_tbt"] = _share((r.num_in_time, r.num_steps) for r in steps)
        found["step_tbt_deposit"] = _share((r.num_in_time_deposit, r.num_steps) for r in steps)
        found["step_tpot"] = _share((r.tpot_met, 1) for r in steps)
    if done:
        found |= _latencies(done) | _rates(done)
    return found | _totals(run)


def _latencies(done: Sequence[Outcome]) -> dict[str, float]:
    gaps_s = sorted(b - a for outcome in done for a, b in pairwise(outcome.generated_s))
    tpots_s = sorted(tpot for o in done if (tpot := tpot_s(o.generated_s)) is not None)
    ttfts_s = sorted(outcome.generated_s[0] - outcome.arrival_s for outcome in done)
    return {
        "p50_s": quantile(gaps_s, 0.5),
        "p95_s": quantile(gaps_s, 0.95),
        "p99_s": quantile(gaps_s, 0.99),
        "tpot_p95_s": quantile(tpots_s, 0.95),
        "tpot_p99_s": quantile(tpots_s, 0.99),
        "ttft_s": statistics.fmean(ttfts_s),
        "ttft_p50_s": quantile(ttfts_s, 0.5),
        "ttft_p95_s": quantile(ttfts_s, 0.95),
        "ttft_p99_s": quantile(ttfts_s, 0.99),
        "e2e_s": statistics.fmean(o.generated_s[-1] - o.arrival_s for o in done),
    }


def _rates(done: Sequence[Outcome]) -> dict[str, float]:
    seconds = max(o.generated_s[-1] for o in done) - min(o.arrival_s for o in done)
    num_tokens = sum(len(outcome.generated_s) for outcome in done)
    return {
        "output_tokens": num_tokens,
        "tokens_per_s": num_tokens / seconds,
        "requests_per_min": 60.0 * len(done) / seconds,
        **streaming.figures(done, seconds),
        **(waste(done, seconds) if any(o.leaves_after is not None for o in done) else {}),
    }


class Answer(Protocol):
    """What was made of an answer, and what of it is read."""

    @property
    def generated_s(self) -> Sequence[float]: ...
    @property
    def read_s(self) -> Sequence[float]: ...
    @property
    def num_output_tokens(self) -> int: ...


def waste(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Return what of answers with tokens is never read or never made, as shares."""
    num_generated = sum(len(answer.generated_s) for answer in answers)
    num_read = sum(len(answer.read_s) for answer in answers)
    return {
        "unread": 1.0 - num_read / num_generated,
        "unmade": 1.0 - num_generated / sum(answer.num_output_tokens for answer in answers),
        "read_tokens_per_s": num_read / seconds,
    }


def _totals(run: RunRecord) -> dict[str, float]:
    totals, busy_s = run.totals, run.totals.busy_s or 1.0
    return {
        "pool": totals.pool_used_s / busy_s,
        "host": totals.host_used_s / busy_s,
        "offloaded": totals.offloaded_s / busy_s,
        "paused": totals.paused_s / busy_s,
        "stall": totals.stall_s / busy_s,
        "prefill": totals.prefill_s / busy_s,
        "plans_per_request": totals.plans.get("asked", 0) / max(1, len(run.outcomes)),
        "cached": totals.num_cached_tokens
        / max(1, sum(outcome.num_prompt_tokens for outcome in run.outcomes)),
        "duplicate": totals.duplicate_s / busy_s,
        "found": totals.num_found_blocks
        / max(1, totals.num_found_blocks + totals.num_loaded_blocks),
        "recomputed": totals.num_recomputed_tokens / max(1, totals.num_steps),
        "h2d_bytes": totals.h2d_bytes,
        "d2h_bytes": totals.d2h_bytes,
        "pauses": sum(outcome.num_pauses for outcome in run.outcomes),
        "preemptions": sum(outcome.num_preemptions for outcome in run.outcomes),
        "steps": totals.num_steps,
        "events": run.num_events,
        "end_s": run.end_s,
        **{f"plans_{name}": count for name, count in totals.plans.items()},
    }


def quantile(ordered: Sequence[float], frac: float) -> float:
    """Return the value that `frac` of ascending values do not exceed; 0 without values."""
    return ordered[min(len(ordered) - 1, int(frac * len(ordered)))] if ordered else 0.0


def _share(parts: Iterable[tuple[float, float]]) -> float:
    """Return the sum of the first numbers / the sum of the second; 1 for nothing at all."""
    met, total = 0.0, 0.0
    for part, whole in parts:
        met, total = met + part, total + whole
    return met / total if total else 1.0
