"""An engine that exists, as its executor has measured it.

The planner's decision log holds the executor's snapshots: shape, online profile, rates of the link.
"""

import json
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from services.placement.types import EngineShape, Link, Profile
from simulator.device.costs import StepLoad, resident_step_s
from simulator.engine.machine import Machine
from simulator.memory.room import pool_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCosts:
    """What the executor's profile says of steps; prompts take their own time per token."""

    profile: Profile
    num_layers: int

    def layer_s(self, load: StepLoad) -> float:
        prompt_s = self.profile.prefill_s_per_token * load.num_prefill_tokens / self.num_layers
        if not load.num_decodes and prompt_s > 0.0:
            return prompt_s
        return self.profile.layer_s(load.num_decodes, load.num_context_tokens) + prompt_s

    def outside_s(self, load: StepLoad) -> float:
        # A prompt's time per token is of whole steps.
        return self.profile.outside_layers_s if load.num_decodes else 0.0

    def reduce_bytes(self, load: StepLoad) -> int:
        return 0  # they are part of what was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDeployment:
    """One engine on the machine on which it was measured."""

    engine: EngineShape
    profile: Profile
    link: Link  # host to GPU; the other direction has the same rate

    @property
    def block_size(self) -> int:
        return self.engine.block_size

    @property
    def title(self) -> str:
        return "measured engine"

    def shape(self) -> EngineShape:
        return self.engine

    def machine(self) -> Machine:
        """Return the machine, without noise: a profile has means only."""
        return Machine(
            costs=ProfiledCosts(profile=self.profile, num_layers=self.engine.num_layers),
            link_bytes_per_s=self.link.at_peak().bytes_per_s,
            copy_overhead_s=self.link.copy_overhead_s,
            chunk_bytes=self.link.chunk_bytes,
        )

    def base_tbt_s(self) -> float:
        """Return the decode latency of the longest request that fits with nothing offloaded."""
        longest = pool_tokens(self.engine)
        longest = min(longest, self.engine.max_model_len or longest)
        load = StepLoad(num_decodes=1, num_context_tokens=longest)
        costs = self.machine().costs
        return resident_step_s(costs, load, num_layers=self.engine.num_layers)


def read_decision_log(path: Path) -> MeasuredDeployment:
    """Return the engine of the newest snapshot in a planner's decision log.

    Raises ValueError if the file has none, or if that one lacks a profile or a link.
    """
    with path.open() as file:
        newest = deque(file, maxlen=1)
    try:
        snapshot = json.loads(newest[0])["snapshot"]
        # 64-bit numbers are texts there, which the adapters take.
        return MeasuredDeployment(
            engine=TypeAdapter(EngineShape).validate_python(snapshot["engine"]),
            profile=TypeAdapter(Profile).validate_python(snapshot["profile"]),
            link=replace(TypeAdapter(Link).validate_python(snapshot["h2d"]), num_queued_bytes=0),
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: no snapshot of a measured engine: {error!r}") from error
