"""What the planner can be told: `EVENFLOW_PLANNER_*`."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from services.kit.settings import ServiceSettings
from services.placement.presets import loadable

GroupCount = Annotated[int, Field(ge=1, le=192)]
PolicyName = Annotated[str, AfterValidator(loadable)]


class PlannerSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="EVENFLOW_PLANNER_")

    grpc_port: int = Field(default=50052, ge=0, le=65535)  # 0 picks a free port
    metrics_port: int = Field(default=9052, ge=0, le=65535)  # 0 picks a free port
    budget_s: float = Field(default=0.02, gt=0, le=60)  # the longest search for one plan
    warm_groups: tuple[GroupCount, ...] = (8, 32)  # engines to be ready for, in layer groups
    # Policies as `module:attribute` that executors may ask for, beside those that the stack has.
    policies: tuple[PolicyName, ...] = ()
    decision_log: Path | None = None  # file that each plan is appended to, with its input
