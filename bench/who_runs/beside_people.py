"""Agents that wait for tools, and people that read, on one engine: what each of them has.

The agents are those of `sessions.py`, the same under each policy. People come while the agents are
at work, state how fast they read and when they want the first token.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile

from bench.document import Row
from bench.who_runs.cases import Case, Regime, lognormal, on_gpu
from bench.who_runs.columns import HEAD, figure, table_of
from bench.who_runs.reading import PEOPLE
from bench.who_runs.sessions import AGENTS, pairs, places
from simulator.workload import ArrivingRequest, drawn_requests, gamma_gaps

POLICIES = ("vllm", "vllm@0.02", "vllm@0.05", "vllm-offloading", "evenflow")
PROMPT_TOKENS, ANSWER_TOKENS = 2_000, 300  # of a person, means
RATES_PER_S = (0.3, 0.6)  # of people
WINDOW_S = 240.0  # the agents' time, where nothing waits: in which people come
DEFINITIONS = {
    "lambda": "bytes that the link moves in a resident decode step / bytes of the KV pool",
    "people": f"{PROMPT_TOKENS:,} + {ANSWER_TOKENS} tokens, {PEOPLE.consumption_rate_tps:g} read "
    f"per second, a TTFT SLO of {PEOPLE.slo_ttft_s:g} s; times to the first token in seconds",
    "in time": "tokens of people after the first that are there 5 ms after they are due at the "
    "latest, behind Token-Deposit",
    "agents' tokens/s": "of their answers, from the first arrival to their last token",
    "agents' end": "from a step's arrival to its last token, mean, in seconds",
    "vllm@0.02": "vLLM with `watermark` 0.02",
    "vllm-offloading": "vLLM with its OffloadingConnector and as much host memory",
}
COLUMNS = (
    *HEAD,
    figure("people's TTFT P50, s", "people_ttft_p50_s", ".3f"),
    figure("P95, s", "people_ttft_p95_s", ".3f"),
    figure("within SLO", "people_within_slo", ".0%"),
    figure("in time", "tbt_deposit", ".2%"),
    figure("agents' tokens/s", "agents_tokens_per_s", ".1f"),
    figure("agents' end, s", "agents_e2e_s", ".2f"),
    figure("next TTFT P95, s", "next_ttft_p95_s", ".3f"),
    figure("recomputed", "recomputed_tokens", ",.0f"),
)
table = partial(table_of, COLUMNS)


def regimes() -> dict[str, Regime]:
    """Return the regimes by name."""
    name = f"{AGENTS.num_sessions} agents, people at"
    return {
        f"{place}, {name} {rate_per_s:g}/s": with_people(on_gpu(where, AGENTS.steps), rate_per_s)
        for place, where in places().items()
        for rate_per_s in RATES_PER_S
    }


def with_people(regime: Regime, rate_per_s: float) -> Regime:
    """Return a regime to which people come, so many per second, for WINDOW_S."""

    def case(seed: int) -> Case:
        made = regime(seed)
        both = [*made.requests, *people(rate_per_s, seed)]
        return replace(made, requests=sorted(both, key=lambda one: one.arrival_s))

    return case


def people(rate_per_s: float, seed: int) -> list[ArrivingRequest]:
    """Return what people ask, by arrival."""
    gaps_s = gamma_gaps(random.Random(f"people {seed}"), rate_per_s=rate_per_s, cv=1.0)
    drawn = drawn_requests(
        gaps_s,
        (lognormal(PROMPT_TOKENS), lognormal(ANSWER_TOKENS)),
        num_requests=round(2 * WINDOW_S * rate_per_s),
        seed=seed,
        level=PEOPLE,
    )
    return list(takewhile(lambda one: one.arrival_s < WINDOW_S, drawn))


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return a line for each regime and other policy: ours beside it."""
    return [_verdict(ours, other) for ours, other in pairs(rows)]


def _verdict(ours: Row, other: Row) -> str:
    """Say how ours compares, and whether it is behind: by 2 % of a TTFT, 1 % of tokens/s."""
    p95, tokens = (
        ours[name] / other[name] for name in ("people_ttft_p95_s", "agents_tokens_per_s")
    )
    points = 100 * (ours["tbt_deposit"] - other["tbt_deposit"])
    behind = p95 > 1.02 or tokens < 0.99 or points < -0.5
    return (
        f"{ours['regime']}: beside {other['policy']} people's first token at P95 in {p95:.3f} x "
        f"the time, {points:+.2f} points in time, agents' tokens/s {tokens:.3f} x"
        f"{': behind' if behind else ''}"
    )
