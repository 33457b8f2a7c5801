"""Options of the controller, as they travel in vLLM's `additional_config`."""

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from services.kit.transport import PLAIN, Certificates, Transport
from services.placement.types import BufferMode, PolicyParameters, VictimRule

CONFIG_KEY = "evenflow_controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions:
    """Which policy acts, and when it is asked."""

    policy: str = "orbitflow"  # preset of `services.placement.presets`
    shadow_policy: str = ""  # preset whose plans are only compared; empty: none
    planner_address: str = ""  # "host:port"; empty: nobody is asked
    transport: Transport = PLAIN  # to the planner
    plan_timeout_s: float = 1.0  # of one call, > 0
    retry_s: float = 1.0  # between a call that failed and the next one, > 0
    mismatch_frac: float = 0.15  # of the predicted step that a measured one may differ; 0: any
    overdue_steps: int = 64  # a plan void for so long is dropped, >= 1
    seed: int = 0  # for policies that draw at random
    parameters: PolicyParameters = field(default_factory=PolicyParameters)

    @classmethod
    def of(cls, vllm_config: Any) -> "ControllerOptions":
        """Return the options that an engine of this `VllmConfig` was started with."""
        packed = dict((vllm_config.additional_config or {}).get(CONFIG_KEY, {}))
        parameters = dict(packed.pop("parameters", {}))
        if parameters.get("victim_rule") is not None:
            parameters["victim_rule"] = VictimRule(parameters["victim_rule"])
        if "buffer_mode" in parameters:
            parameters["buffer_mode"] = BufferMode(parameters["buffer_mode"])
        transport = dict(packed.pop("transport", {}))
        if transport.get("certificates"):
            transport["certificates"] = Certificates(**transport["certificates"])
        return cls(
            parameters=PolicyParameters(**parameters), transport=Transport(**transport), **packed
        )

    def engine_args(self) -> dict[str, Any]:
        """Return what `additional_config` gets, made of plain values."""
        plain = asdict(self)
        plain["parameters"] = {
            name: value.value if isinstance(value, Enum) else value
            for name, value in plain["parameters"].items()
        }
        return {CONFIG_KEY: plain}
