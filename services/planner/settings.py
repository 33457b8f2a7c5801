"""What the planner can be told: `EVENFLOW_PLANNER_*`."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.kit.settings import ServiceSettings


class PlannerSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="EVENFLOW_PLANNER_")

    grpc_port: int = Field(default=50052, ge=0, le=65535)  # 0 picks a free port
    metrics_port: int = Field(default=9052, ge=0, le=65535)  # 0 picks a free port
