"""Settings: one frozen class per service, read once from the environment."""

import sys
from typing import TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.kit.log import Level

BAD_SETTINGS_EXIT_CODE = 78  # EX_CONFIG of sysexits.h


class ServiceSettings(BaseSettings):
    """What every service can be told. Subclasses set their own `env_prefix`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"  # address that all ports of this process bind to
    metrics_port: int = Field(default=0, ge=0, le=65535)  # Prometheus endpoint; 0 picks a free port
    log_level: Level = "info"
    drain_timeout_s: float = Field(default=10.0, ge=0)  # given to live calls after SIGTERM


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def load(settings_class: type[SettingsT]) -> SettingsT:
    """Read settings from the environment, or stop the process naming each bad variable."""
    try:
        return settings_class()
    except ValidationError as error:
        prefix = settings_class.model_config.get("env_prefix", "")
        for problem in error.errors():
            name = "_".join(str(part) for part in problem["loc"])
            print(f"{prefix}{name.upper()}: {problem['msg']}", file=sys.stderr)
        sys.exit(BAD_SETTINGS_EXIT_CODE)
