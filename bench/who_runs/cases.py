"""What policies are compared on."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.placement.types import EngineShape
from simulator.deployment import Deployment
from simulator.device.drafts import Drafts
from simulator.device.hardware import assumptions, device, link_rates, model
from simulator.engine.machine import Machine
from simulator.workload import ArrivingRequest, Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One seed of a regime."""

    shape: EngineShape
    machine: Machine
    requests: Sequence[ArrivingRequest]
    counted_from_s: float = 0.0  # requests that arrive earlier warm the engine up
    report_interval_s: float = 0.0
    fluid: Mapping[str, float] = field(default_factory=dict)  # see `capacity.first_tokens`

    def with_host(self, frac: float) -> "Case":
        """Return the same with so much room on the host, of the pool."""
        shape = replace(self.shape, num_host_blocks=int(frac * self.shape.num_blocks))
        return replace(self, shape=shape)

    def with_drafts(self, drafts: Drafts) -> "Case":
        """Return the same with speculative decoding, of which no fluid knows."""
        shape = replace(self.shape, max_ahead_tokens=drafts.max_ahead_tokens)
        machine = replace(self.machine, drafts=drafts)
        return replace(self, shape=shape, machine=machine, fluid={})


Regime = Callable[[int], Case]


def on_gpu(deployment: Deployment, requests: Callable[[int], list[ArrivingRequest]]) -> Regime:
    """Return a deployment by its roofline."""
    return lambda seed: Case(
        shape=deployment.shape(), machine=deployment.machine(), requests=requests(seed)
    )


def as_shipped(name: str, gpu: str) -> Deployment:
    """Return a deployment with the simulator's own defaults, and 64 requests in a step."""
    return Deployment(
        model=model(name), device=device(gpu), assumptions=assumptions(), max_num_seqs=64
    )


def deployed(name: str, gpu: str, *, link: str = "", num_groups: int = 8, **given) -> Deployment:
    shape = model(name)
    made = Deployment(
        model=shape,
        device=device(gpu),
        assumptions=assumptions(),
        layers_per_group=-(-shape.num_hidden_layers // num_groups),
        host_memory_bytes=10**12,
        **given,
    )
    return made.with_link(link_rates()[link]) if link else made


def lognormal(mean: float, *, sigma: float = 0.5, largest: int = 30_000) -> Lengths:
    median = mean * math.exp(-sigma * sigma / 2.0)
    return Lengths(mean=mean, median=median, largest=largest, smallest=8)
