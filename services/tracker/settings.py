"""What the tracker can be told: `EVENFLOW_TRACKER_*`."""

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from services.kit.redis_url import RedisUrl
from services.kit.settings import ServiceSettings


class TrackerSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="EVENFLOW_TRACKER_")

    grpc_port: int = Field(default=50053, ge=0, le=65535)  # 0 picks a free port
    metrics_port: int = Field(default=9053, ge=0, le=65535)  # 0 picks a free port
    redis_url: RedisUrl = SecretStr("redis://127.0.0.1:6379/0")
    redis_timeout_s: float = Field(default=1.0, gt=0)  # to connect, and for each answer
    lease_ttl_s: float = Field(default=5.0, gt=0)  # of an executor, from its last renewal
    request_ttl_s: float = Field(default=60.0, gt=0)  # of a live request, from its last report
    retention_s: float = Field(default=600.0, gt=0)  # of an ended request, from its last report
