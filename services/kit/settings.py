"""Settings: one frozen class per service, read once from the environment."""

import os
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
    """Read settings from the environment, or stop the process naming each bad variable.

    A variable with the class's prefix that no setting has is a bad one: most likely mistyped.
    """
    prefix = settings_class.model_config.get("env_prefix", "")
    known = {f"{prefix}{name}".upper() for name in settings_class.model_fields}
    problems = [
        f"{name}: there is no such setting"
        for name in sorted(os.environ)
        if name.startswith(prefix) and name not in known
    ]
    try:
        settings = settings_class()
    except ValidationError as error:
        problems += [f"{prefix}{_name(e['loc'])}: {e['msg']}" for e in error.errors()]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        sys.exit(BAD_SETTINGS_EXIT_CODE)
    return settings


def _name(location: tuple[int | str, ...]) -> str:
    return str(location[0]).upper()
