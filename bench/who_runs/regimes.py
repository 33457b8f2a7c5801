"""Where policies are compared: machines, workloads, and how slow the link is beside the pool.

lambda = bytes that the link moves in a resident decode step / bytes of the KV pool. Each regime is
a function of a seed; its requests are the same under every policy.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from bench.e2e.systems import MAX_NUM_SEQS, Device
from bench.e2e.trace import poisson_trace
from bench.fidelity.machine import Calibration, machine_of, shape_of
from bench.fidelity.replayed import WARM_UP_S, warm_up_of
from bench.papers import ellm, layerkv, orbitflow, tokenflow
from bench.who_runs import beside_people, prefixes, reading, sessions
from bench.who_runs.cases import Case, Regime, deployed, lognormal, on_gpu
from bench.who_runs.demo_readers import demo
from services.gateway.executors.outbox import DELIVERED_INTERVAL_S
from services.pacing.types import ServiceLevel
from services.placement.types import RequestId
from simulator.comparison.grid import Cell
from simulator.device.step import CopyCosts
from simulator.workload import (
    ArrivingRequest,
    drawn_requests,
    gamma_gaps,
    published_lengths,
)

# What docs/results/orbitflow.md was measured on, as `bench.fidelity` calibrated it.
BASE_SLO_S = 28.9e-3
CALIBRATION = Calibration(
    outside_s=5.2e-3,
    noise_frac=0.03,
    num_steps=0,
    prompt_token_s=5.5e-6,
    copies=CopyCosts(submit_s=0.16e-3),
)
MEAN_ANSWER_TOKENS = 108
LOAD = 0.8
AT_20_TPS = ServiceLevel(slo_tbt_s=0.05)


def emulated(scale: float, link_bytes_per_s: float) -> Regime:
    """Return the emulated device of `bench.e2e` at a link, readers at S = `scale` x the base."""

    def case(seed: int) -> Case:
        slo_s = scale * BASE_SLO_S
        level = ServiceLevel(slo_tbt_s=slo_s, slo_tpot_s=slo_s)
        gap_s = MEAN_ANSWER_TOKENS * BASE_SLO_S / MAX_NUM_SEQS / LOAD
        on = Device(link_bytes_per_s=link_bytes_per_s)
        requests = [
            ArrivingRequest(
                request_id=RequestId(one.request_id),
                arrival_s=WARM_UP_S + one.arrival_s,
                num_prompt_tokens=one.num_prompt_tokens,
                num_output_tokens=one.num_output_tokens,
                level=level,
            )
            for one in poisson_trace(seed=seed, num_requests=64, mean_gap_s=gap_s)
        ]
        return Case(
            shape=shape_of(on, offloads=True),
            machine=machine_of(on, CALIBRATION),
            requests=[*warm_up_of(level), *requests],
            counted_from_s=WARM_UP_S,
            report_interval_s=DELIVERED_INTERVAL_S,
        )

    return case


def arriving(
    rate_per_s: float, prompt: float, answer: float, num_requests: int
) -> Callable[[int], list[ArrivingRequest]]:
    """Return bursty arrivals (gamma, cv 1.7) of lognormal lengths, readers at 20 tokens/s."""

    def requests(seed: int) -> list[ArrivingRequest]:
        gaps = gamma_gaps(random.Random(f"arrivals {seed}"), rate_per_s=rate_per_s, cv=1.7)
        lengths = (lognormal(prompt), lognormal(answer))
        return drawn_requests(gaps, lengths, num_requests=num_requests, seed=seed, level=AT_20_TPS)

    return requests


TTFT_SLOS_S = (5.0, 20.0, 60.0, None)


def with_ttft_slos(
    requests: Callable[[int], list[ArrivingRequest]],
) -> Callable[[int], list[ArrivingRequest]]:
    """Return requests of which each states one of `TTFT_SLOS_S`, or none."""

    def stated(seed: int) -> list[ArrivingRequest]:
        rng = random.Random(f"TTFT SLOs {seed}")
        levels = {slo_s: replace(AT_20_TPS, slo_ttft_s=slo_s) for slo_s in TTFT_SLOS_S}
        return [replace(one, level=levels[rng.choice(TTFT_SLOS_S)]) for one in requests(seed)]

    return stated


# Requests per second of ShareGPT's lengths that fill an A5000 with a pool of 8,000 tokens.
SHAREGPT_CAPACITY = 1.05
LAYERKV_CONTEXT = 4_096
LEVAL_LOAD = 1.2
READING_RATES: Mapping[str, tuple[float | None, ...]] = MappingProxyType(
    {"unpaced": (None,), "half": (15.0, None), "mixed": (5.0, 10.0, 20.0, 40.0)}
)


def sharegpt(readers: str, load: float) -> Callable[[int], list[ArrivingRequest]]:
    """Return chats whose readers state one of `READING_RATES`, or none."""

    def requests(seed: int) -> list[ArrivingRequest]:
        rng, arrival_s, made = random.Random(f"chats {seed}"), 0.0, list[ArrivingRequest]()
        lengths = published_lengths("sharegpt")
        for number in range(200):
            prompt, answer = (min(2_000, max(4, one.draw(rng))) for one in lengths)
            rate = rng.choice(READING_RATES[readers])
            made.append(
                ArrivingRequest(
                    request_id=RequestId(f"r{number}"),
                    arrival_s=arrival_s,
                    num_prompt_tokens=prompt,
                    num_output_tokens=answer,
                    level=ServiceLevel(consumption_rate_tps=rate) if rate else ServiceLevel(),
                )
            )
            arrival_s += rng.expovariate(load * SHAREGPT_CAPACITY)
        return made

    return requests


def paper(cell: Cell) -> Regime:
    """Return one cell of a paper's figures, without the requests that vLLM refuses."""

    def case(seed: int) -> Case:
        shape, requests = cell.deployment.shape(), replace(cell, seed=seed).requests()
        pool_tokens = shape.num_blocks // shape.num_groups * shape.block_size
        fitting = [
            one for one in requests if one.num_prompt_tokens + one.num_output_tokens <= pool_tokens
        ]
        return Case(shape=shape, machine=cell.deployment.machine(), requests=fitting)

    return case


def papers() -> dict[str, Regime]:
    """Return the regimes of the papers in which requests wait for room."""
    small = replace(orbitflow.FULL, num_requests=32)
    regimes = {
        f"OrbitFlow, load 3, S x {point.cell.slo_scale}": paper(point.cell)
        for point in orbitflow.figures(small)["8"]
        if point.x == orbitflow.LOAD and point.cell.policy == "vllm"
    }
    for name in ("4090 (a)", "4090 (b)"):
        regimes[f"TokenFlow, {name}"] = paper(tokenflow.figures(tokenflow.QUICK)[name][0].cell)
    for point in layerkv.figures(layerkv.FULL)["4 llama-2-7b"]:
        if point.x == LAYERKV_CONTEXT:
            regimes["LayerKV, L20, 4,096 + 512"] = paper(point.cell)
    for point in ellm.figures(replace(ellm.FULL, num_requests=40))["70B, L-Eval"]:
        if point.x == LEVAL_LOAD:
            regimes["eLLM, 70B, L-Eval, load 1.2"] = paper(point.cell)
    return regimes


def one_larger_than_the_pool(seed: int) -> list[ArrivingRequest]:
    level = ServiceLevel(slo_tbt_s=1 / 15)
    gaps = gamma_gaps(random.Random(f"arrivals {seed}"), rate_per_s=0.3, cv=1.7)
    lengths = (lognormal(2_000, largest=9_000), lognormal(400, largest=9_000))
    others = drawn_requests(gaps, lengths, num_requests=40, seed=seed, level=level)
    large = ArrivingRequest(
        request_id=RequestId("large"),
        arrival_s=20.0,
        num_prompt_tokens=13_000,
        num_output_tokens=200,
        level=level,
    )
    return sorted([*others, large], key=lambda one: one.arrival_s)


def links() -> dict[str, Regime]:
    """Return the regimes that differ in their link and lengths, by name."""
    regimes: dict[str, Regime] = {
        f"bench {link / 1e6:.0f} MB/s, S x {scale}": emulated(scale, link)
        for link in (300e6, 50e6, 10e6)
        for scale in (1.0, 1.5, 2.5)
    }
    h100 = deployed("llama-2-7b", "h100", link="pcie4x16", max_num_seqs=512)
    for rate in (0.7, 1.0):
        regimes[f"7B, H100, 9k + 600, {rate}/s"] = on_gpu(h100, arriving(rate, 9_000, 600, 60))
    asked = with_ttft_slos(arriving(0.7, 9_000, 600, 60))
    regimes["7B, H100, TTFT SLOs, 0.7/s"] = on_gpu(h100, asked)
    h100 = deployed("llama-3-8b", "h100", max_num_seqs=512)
    regimes["8B, H100, 24k + 800, 0.8/s"] = on_gpu(h100, arriving(0.8, 24_000, 800, 80))
    a5000 = deployed("llama-3-8b", "a5000", max_num_seqs=512)
    for rate in (0.15, 0.25):
        name = f"8B, A5000, 6k + 800, {rate}/s"
        regimes[name] = on_gpu(a5000, arriving(rate, 6_000, 800, 60))
    small = deployed("llama-3-8b", "a5000", pool_tokens=8_000, max_num_seqs=256)
    for readers in READING_RATES:
        for load in (0.8, 1.2):
            regimes[f"ShareGPT, {readers}, load {load}"] = on_gpu(small, sharegpt(readers, load))
    small = deployed("llama-3-8b", "a5000", pool_tokens=12_000, max_num_seqs=256, num_groups=32)
    regimes["one of 13,000 tokens, pool 12,000"] = on_gpu(small, one_larger_than_the_pool)
    regimes |= {"demo, four at once": demo} | papers()
    return regimes | prefixes.regimes()


SETS: Mapping[str, Callable[[], dict[str, Regime]]] = MappingProxyType(
    {
        "links": links,
        "reading": reading.regimes,
        "sessions": sessions.regimes,
        "people": beside_people.regimes,
    }
)


def all_regimes() -> dict[str, Regime]:
    """Return the regimes of all sets by name."""
    return {name: regime for regimes in SETS.values() for name, regime in regimes().items()}
