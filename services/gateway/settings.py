"""What the gateway can be told: `EVENFLOW_GATEWAY_*`."""

import re
import socket

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from services.kit.rpc import VALID_REQUEST_ID
from services.kit.settings import ServiceSettings

_ADDRESS = re.compile(r"[^\s:,]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")


def _checked_address(address: str) -> str:
    if not _ADDRESS.fullmatch(address) or int(address.rsplit(":", 1)[1]) > 65535:
        raise ValueError(f'"{address}" is not host:port')
    return address


class GatewaySettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="EVENFLOW_GATEWAY_")

    http_port: int = Field(default=8000, ge=0, le=65535)  # OpenAI API; 0 picks a free port
    grpc_port: int = Field(default=50050, ge=0, le=65535)  # 0 picks a free port
    executors: str = "127.0.0.1:50051"  # "host:port,host:port", at least one
    tracker: str = "127.0.0.1:50053"  # host:port; empty: progress is not recorded
    # Stable name; empty: host name and HTTP port, so give one if that port is 0.
    id: str = Field(default="", pattern=f"^({VALID_REQUEST_ID.pattern})?$")
    max_live_requests: int = Field(default=1024, ge=1)  # above it: 429
    submit_timeout_s: float = Field(default=30.0, gt=0)  # for an executor to accept or reject
    sse_keepalive_s: float = Field(default=15.0, ge=0)  # comment in a silent stream; 0: none
    tracker_flush_timeout_s: float = Field(default=2.0, ge=0)  # for last counts at shutdown

    @field_validator("executors")
    @classmethod
    def _check_executors(cls, value: str) -> str:
        addresses = [_checked_address(part.strip()) for part in value.split(",")]
        if len(set(addresses)) != len(addresses):
            raise ValueError("an address is listed twice")
        return ",".join(addresses)

    @field_validator("tracker")
    @classmethod
    def _check_tracker(cls, value: str) -> str:
        return value and _checked_address(value)

    @field_validator("metrics_port")
    @classmethod
    def _check_metrics_port(cls, value: int) -> int:
        if value:
            raise ValueError("the gateway serves /metrics on its HTTP port; leave this unset")
        return value

    @property
    def executor_addresses(self) -> tuple[str, ...]:
        return tuple(self.executors.split(","))

    @property
    def name(self) -> str:
        """Return the name that executors and tracker know this gateway by."""
        return self.id or f"{socket.gethostname()}:{self.http_port}"
