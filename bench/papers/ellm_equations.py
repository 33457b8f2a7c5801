"""eLLM's Eq. 1 to 5, as printed and in a form that is consistent, and three ways to solve them.

All requests have one length. The consistent form is the simulator's roofline: a step reads the
weights once, the head runs for one token per request and one per prefix that is computed anew, K
and V have as many heads as the model, attention is causal, and uncached KV has room for one layer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from scipy.optimize import minimize

from services.placement.run.papers.ellm import Batch, best_batch
from simulator.deployment import Deployment
from simulator.device.hardware import BYTES_PER_ELEMENT, assumptions, device, model

MAX_REQUESTS = 512  # B of Eq. 1
STARTS = tuple((float(b), r) for b in (1, 20, 100) for r in (0.0, 0.3, 0.6))  # of SLSQP


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A row of Table 1."""

    deployment: Deployment
    prompt: int  # tokens, mean
    answer: int  # tokens, mean
    slo_s: float  # TPOT
    paper_frac: float  # r that the paper reports, mean

    @property
    def num_tokens(self) -> int:
        """Tokens of a request that is half-way through its answer."""
        return self.prompt + self.answer // 2

    @property
    def room_bytes(self) -> float:
        """What the GPUs' memory holds of weights and KV."""
        on = self.deployment
        usable = on.device.memory_bytes * (1.0 - on.assumptions.reserved_memory_frac)
        return on.num_devices * usable

    @property
    def weight_bytes(self) -> int:
        return self.deployment.model.num_parameters * BYTES_PER_ELEMENT


class Form(Protocol):
    """What Eq. 1 and 5 ask: b and r may be fractional."""

    def step_s(self, b: float, r: float) -> float:
        """Return T(b, r)."""

    def memory_bytes(self, b: float, r: float) -> float:
        """Return what KV, weights and the room for uncached KV take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """Eq. 2 to 4 and the second line of Eq. 1, letter by letter."""

    setting: Setting

    def recompute_flops(self, r: float) -> float:
        """Return Eq. 2 of one request."""
        shape, s = self.setting.deployment.model, self.setting.num_tokens
        layers, h = shape.num_hidden_layers, shape.hidden_size
        tokens = s * r
        return (
            24 * h * h * layers * tokens
            + 4 * h * layers * tokens * tokens
            + self.head_flops(tokens)
        )

    def decode_flops(self) -> float:
        """Return Eq. 3 of one request."""
        shape, s = self.setting.deployment.model, self.setting.num_tokens
        layers, h = shape.num_hidden_layers, shape.hidden_size
        return 24 * h * h * layers + 4 * h * layers * (s + 1) + self.head_flops(s)

    def head_flops(self, num_tokens: float) -> float:
        shape = self.setting.deployment.model
        return 2 * shape.hidden_size * shape.vocab_size * num_tokens

    def step_s(self, b: float, r: float) -> float:
        on = self.setting.deployment
        flops_per_s = on.device.flops_per_s * on.num_devices
        return b * (self.recompute_flops(r) + self.decode_flops()) / flops_per_s

    def memory_bytes(self, b: float, r: float) -> float:
        shape, s = self.setting.deployment.model, self.setting.num_tokens
        kept = 4 * shape.num_hidden_layers * shape.hidden_size * b * s * (1 - r)
        return kept + self.setting.weight_bytes + 40 * shape.hidden_size * b * s * r


@dataclass(frozen=True, slots=True, kw_only=True)
class Consistent:
    """The same with the simulator's costs: a test holds it equal to `Roofline`."""

    setting: Setting

    def step_s(self, b: float, r: float) -> float:
        on, s = self.setting.deployment, self.setting.num_tokens
        shape, given = on.model, on.assumptions
        anew, rows = s * r, b * (1 + s * r)
        pairs = b * (s + 1) + b * anew * (anew + 1) / 2
        read_bytes = b * (s + 1 + anew) * shape.kv_bytes_per_token
        heads = shape.num_attention_heads * shape.head_dim
        layer_s = (
            self._products_s(shape.num_layer_parameters, rows)
            + self._longer_s(4 * pairs * heads, read_bytes)
            + self._reduces_s(rows)
            + given.layer_overhead_s
        )
        head_s = self._products_s(shape.num_head_parameters, b * (1 + min(1.0, anew)))
        return shape.num_hidden_layers * layer_s + head_s + given.outside_s

    def memory_bytes(self, b: float, r: float) -> float:
        shape, tokens = self.setting.deployment.model, b * self.setting.num_tokens
        layers = shape.num_hidden_layers * (1 - r) + r
        return self.setting.weight_bytes + shape.kv_bytes_per_token * layers * tokens

    def _products_s(self, num_parameters: int, rows: float) -> float:
        return self._longer_s(2 * num_parameters * rows, num_parameters * BYTES_PER_ELEMENT)

    def _longer_s(self, flops: float, num_bytes: float) -> float:
        on = self.setting.deployment
        flops_s = flops / (on.device.flops_per_s * on.assumptions.flops_efficiency)
        bytes_s = num_bytes / (on.device.memory_bytes_per_s * on.assumptions.memory_efficiency)
        return max(flops_s, bytes_s) / on.num_devices

    def _reduces_s(self, rows: float) -> float:
        on = self.setting.deployment
        if on.num_devices == 1:
            return 0.0
        sent = 2 * (on.num_devices - 1) / on.num_devices * rows * on.model.hidden_size
        rate = on.device.peer_bytes_per_s * on.assumptions.link_efficiency
        return 2 * (on.assumptions.all_reduce_latency_s + sent * BYTES_PER_ELEMENT / rate)


def settings() -> Mapping[str, Setting]:
    """Return Table 1, with the mean lengths and the mean ratios that section 6 states."""
    sharegpt = {"prompt": 222, "answer": 1_346, "paper_frac": 0.36}
    leval = {"prompt": 35_956, "answer": 5_189, "paper_frac": 0.47}
    one, four = deployment("llama-2-13b", 1), deployment("llama-2-70b", 4)
    return {
        "13B, ShareGPT": Setting(deployment=one, slo_s=0.05, **sharegpt),  # type: ignore[arg-type]
        "70B, ShareGPT": Setting(deployment=four, slo_s=0.5, **sharegpt),  # type: ignore[arg-type]
        "13B, L-Eval": Setting(deployment=one, slo_s=0.06, **leval),  # type: ignore[arg-type]
        "70B, L-Eval": Setting(deployment=four, slo_s=0.2, **leval),  # type: ignore[arg-type]
    }


def deployment(name: str, num_devices: int) -> Deployment:
    """Return a model on A100s that have no NVLink, and 40 GB of host memory each (section 6.1)."""
    gpu = device("a100")
    return Deployment(
        model=model(name),
        device=replace(gpu, peer_bytes_per_s=gpu.link_bytes_per_s),
        assumptions=assumptions(),
        num_devices=num_devices,
        max_num_seqs=MAX_REQUESTS,
        max_num_batched_tokens=131_072,
        max_model_len=65_536,
        host_memory_bytes=num_devices * 40_000_000_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A solution of Eq. 5 under Eq. 1."""

    b: float
    r: float
    tokens_per_s: float  # b / T


def slsqp(setting: Setting, form: Form) -> list[Answer]:
    """Return what SLSQP answers from each start that it solves."""
    answers = []
    for start in STARTS:
        found = minimize(
            lambda x: 1e3 * form.step_s(*x) / x[0],
            start,
            method="SLSQP",
            bounds=[(1, MAX_REQUESTS), (0, 1)],
            constraints=[
                {"type": "ineq", "fun": lambda x: 1 - form.step_s(*x) / setting.slo_s},
                {"type": "ineq", "fun": lambda x: 1 - form.memory_bytes(*x) / setting.room_bytes},
            ],
        )
        b, r = (float(value) for value in found.x)
        if found.success and is_feasible(setting, form, b - 1e-3, r + 1e-3):
            answers.append(Answer(b=b, r=r, tokens_per_s=b / form.step_s(b, r)))
    return answers


def grid(setting: Setting, form: Form) -> Answer | None:
    """Return the best of all b and of 101 ratios; of equals the largest batch."""
    best: Answer | None = None
    for r in np.linspace(0.0, 1.0, 101):
        b = largest_batch(setting, form, float(r))
        if not b:
            continue
        found = Answer(b=b, r=float(r), tokens_per_s=b / form.step_s(b, float(r)))
        if best is None or found.tokens_per_s > best.tokens_per_s:
            best = found
    return best


def chosen(setting: Setting, form: Form) -> Answer | None:
    """Return what the search of the policy `ellm` finds."""

    def least_frac(b: int) -> float | None:
        none, all_of_it = form.memory_bytes(b, 0.0), form.memory_bytes(b, 1.0)
        if none <= setting.room_bytes:
            return 0.0
        frac = (none - setting.room_bytes) / (none - all_of_it) if none > all_of_it else math.inf
        return frac if frac <= 1.0 else None

    sizes = range(1, MAX_REQUESTS + 1)
    found: Batch | None = best_batch(
        sizes, least_frac=least_frac, step_s=form.step_s, slo_s=lambda size: setting.slo_s
    )
    if found is None:
        return None
    b, r = found.num_requests, found.uncached_frac
    return Answer(b=b, r=r, tokens_per_s=b / form.step_s(b, r))


def largest_batch(setting: Setting, form: Form, r: float) -> int:
    """Return the most requests within Eq. 1 at a ratio; 0 if not even one is."""
    low, high = 0, MAX_REQUESTS
    while low < high:
        middle = (low + high + 1) // 2
        if is_feasible(setting, form, middle, r):
            low = middle
        else:
            high = middle - 1
    return low


def is_feasible(setting: Setting, form: Form, b: float, r: float) -> bool:
    """Return whether Eq. 1 allows a batch; no request waits."""
    in_time = form.step_s(b, r) <= setting.slo_s
    return in_time and form.memory_bytes(b, r) <= setting.room_bytes
