"""Options of the step loop, as they travel in vLLM's `additional_config`."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from services.kit.transport import PLAIN, Transport
from services.placement.presets import Run, preset_of
from services.placement.run.papers import ellm, tokenflow
from services.placement.run.papers.ellm import EllmRules
from services.placement.run.papers.tokenflow import TokenflowRules
from services.placement.types import PolicyParameters

CONFIG_KEY = "evenflow_controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions:
    """Which policy acts, and when it is asked."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    policy: str = "orbitflow"  # see `services.placement.presets.preset_of`
    shadow_policy: str = ""  # whose plans are only compared; empty: none
    planner_address: str = ""  # "host:port"; empty: none is asked
    transport: Transport = PLAIN  # to the planner
    plan_timeout_s: float = 1.0  # of one call, > 0
    retry_s: float = 1.0  # between a call that failed and the next one, > 0
    mismatch_frac: float = 0.15  # of the predicted step that a measured one may differ; 0: any
    overdue_steps: int = 64  # a plan void for so long is dropped, >= 1
    fairness_half_life_s: float = 0.0  # of what fairness ids have attained; 0: they have no shares
    run_log: str = ""  # file that each run decision is appended to; empty: none
    seed: int = 0  # for policies that draw at random
    parameters: PolicyParameters = field(default_factory=PolicyParameters)
    ellm: EllmRules = field(default_factory=EllmRules)
    tokenflow: TokenflowRules = field(default_factory=TokenflowRules)

    @property
    def run(self) -> Run | None:
        """The run policy, by the rules that are given; None: vLLM's own order."""
        run = preset_of(self.policy).run
        if run is ellm.decide:
            return partial(ellm.decide, rules=self.ellm)
        return partial(tokenflow.decide, rules=self.tokenflow) if run is tokenflow.decide else run

    @classmethod
    def of(cls, vllm_config: Any) -> "ControllerOptions":
        """Return the options that an engine of this `VllmConfig` was started with."""
        packed = (vllm_config.additional_config or {}).get(CONFIG_KEY, {})
        return TypeAdapter(cls).validate_python(packed)

    def engine_args(self) -> dict[str, Any]:
        """Return what `additional_config` gets, made of plain values."""
        return {CONFIG_KEY: TypeAdapter(type(self)).dump_python(self, mode="json")}
