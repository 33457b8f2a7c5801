"""`python -m bench.who_runs.fairness`: what two keys get, one of which sends ten times as much.

The same requests under `vllm` and under `evenflow`, without and with fair shares, in virtual time.
Token-seconds of KV in the pool are counted here, event by event, until the last request arrives:
from then on there is only what is left of the key that sent more.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from bench.who_runs.cases import as_shipped
from services.control.order.fair_shares import jain_index
from services.pacing.types import NO_SERVICE_LEVEL
from services.placement.run.reader_capacity import READING_RATE_TPS
from simulator.comparison.grid import Workload
from simulator.comparison.link_ratio import workload_link_ratio
from simulator.compose import make_engine
from simulator.deployment import Deployment
from simulator.engine.engine import Engine
from simulator.engine.events import Event
from simulator.engine.planning import PlanningOptions
from simulator.engine.simulation import simulate
from simulator.workload import ArrivingRequest, Lengths, constant_length

MORE = "more"  # the key that sends TIMES as much as
LESS = "less"
TIMES = 10
HALF_LIFE_S = 300.0  # the executor's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A deployment, and what arrives."""

    model: str
    device: str
    lengths: tuple[Lengths, Lengths]
    rate_per_s: float  # of the key that sends less
    window_s: float  # in which requests arrive

    @property
    def deployment(self) -> Deployment:
        return as_shipped(self.model, self.device)

    @property
    def name(self) -> str:
        prompt, output = (f"{one.mean:,.0f}" for one in self.lengths)
        rates = f"{self.rate_per_s:g} and {TIMES * self.rate_per_s:g}/s"
        return f"{self.model}, {self.device}, {prompt} + {output}, {rates}"

    def requests(self, seed: int) -> list[ArrivingRequest]:
        """Return both keys' requests, by arrival; each reads at READING_RATE_TPS."""
        rates = {LESS: self.rate_per_s, MORE: TIMES * self.rate_per_s}
        both = [
            replace(one, request_id=f"{name}-{one.request_id}", fairness_id=name)
            for name, rate_per_s in rates.items()
            for one in self._of_one(rate_per_s, f"{name}-{seed}")
        ]
        return sorted(both, key=lambda one: one.arrival_s)

    def _of_one(self, rate_per_s: float, seed: str) -> list[ArrivingRequest]:
        workload = Workload(lengths=self.lengths, num_requests=round(self.window_s * rate_per_s))
        level = replace(NO_SERVICE_LEVEL, consumption_rate_tps=READING_RATE_TPS)
        return workload.requests(rate_per_s=rate_per_s, seed=seed, level=level)


REGIMES = (
    Regime(
        model="llama-3-8b",
        device="rtx-4090",
        lengths=(constant_length(8_000), constant_length(300)),
        rate_per_s=0.2,
        window_s=200.0,
    ),
    Regime(
        model="llama-3-8b",
        device="h100",
        lengths=(constant_length(24_000), constant_length(800)),
        rate_per_s=0.4,
        window_s=200.0,
    ),
)


class WindowOver(Exception):  # noqa: N818 - not an error
    """The last request has arrived."""


class Meter:
    """Counts token-seconds of KV in an engine's pool by fairness id, until an instant."""

    def __init__(self, engine: Engine, *, until_s: float) -> None:
        self.token_s: Counter[str] = Counter()
        self._engine, self._until_s = engine, until_s
        self._at_s, self._held = 0.0, Counter[str]()

    def after_event(self, event: Event) -> None:
        """Raise WindowOver at the instant."""
        seconds = min(event.time_s, self._until_s) - self._at_s
        for name, num_tokens in self._held.items():
            self.token_s[name] += num_tokens * seconds
        self._at_s += seconds
        if event.time_s >= self._until_s:
            raise WindowOver
        self._held = Counter()
        shape = self._engine.shape
        for request in self._engine.scheduler.live:
            num_tokens = request.kv.num_owned * shape.block_size / shape.num_groups
            self._held[request.spec.fairness_id] += num_tokens


def ttfts_s(times: Mapping[ArrivingRequest, Sequence[float]], name: str) -> list[float]:
    """Return times to first tokens, of those that came."""
    return [got[0] - one.arrival_s for one, got in times.items() if one.fairness_id == name and got]


def _times(
    engine: Engine, requests: Sequence[ArrivingRequest]
) -> dict[ArrivingRequest, Sequence[float]]:
    """Return when each request got its tokens until now."""
    ended = {one.request_id: one.generated_s for one in engine.outcomes}
    live = {one.request_id: tuple(one.generated_s) for one in engine.scheduler.live}
    return {one: (ended | live)[one.request_id] for one in requests}


def measured(regime: Regime, options: PlanningOptions, *, seeds: int) -> list[str]:
    """Return a row: the shares of KV-seconds, Jain's index, first tokens of both, and tokens per
    second of all until the last arrival.
    """
    token_s, speeds, jain = Counter[str](), list[float](), list[float]()
    firsts: dict[str, list[float]] = {LESS: [], MORE: []}
    for seed in range(seeds):
        requests = regime.requests(seed)
        until_s = requests[-1].arrival_s
        deployment = regime.deployment
        engine = make_engine(deployment.shape(), deployment.machine(), options, seed=seed)
        meter = Meter(engine, until_s=until_s)
        with suppress(WindowOver):
            simulate(engine, requests, after_event=meter.after_event)
        times = _times(engine, requests)
        token_s += meter.token_s
        jain.append(jain_index(meter.token_s.values()))
        speeds.append(sum(map(len, times.values())) / until_s)
        for name, ours in firsts.items():
            ours += ttfts_s(times, name)
    shares = " : ".join(f"{100 * token_s[name] / token_s.total():.1f}" for name in firsts)
    quantiles = [statistics.quantiles(times, n=20) for times in firsts.values()]
    ttfts = [f"{deciles[9]:.1f} / {deciles[18]:.1f}" for deciles in quantiles]
    return [shares, f"{min(jain):.3f}", *ttfts, f"{statistics.mean(speeds):.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--half-life-s", type=float, default=HALF_LIFE_S)
    given = parser.parse_args()
    print(
        "| regime | lambda | under | KV-seconds of the one : the other, % | Jain's index, least "
        "| the one's TTFT P50 / P95, s | the other's | tokens/s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for regime in REGIMES:
        on = regime.deployment
        ratio = workload_link_ratio(on.shape(), on.machine(), regime.requests(0))
        for label, options in (
            ("`vllm`", PlanningOptions(policy="vllm")),
            ("`evenflow`", PlanningOptions(policy="evenflow")),
            (
                "`evenflow`, fair shares",
                PlanningOptions(policy="evenflow", fairness_half_life_s=given.half_life_s),
            ),
        ):
            row = measured(regime, options, seeds=given.seeds)
            cells = (regime.name, f"{100 * ratio:.1f} %", label, *row)
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
