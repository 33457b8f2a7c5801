"""Settings: one frozen class per service, read once from the environment."""

import os
import re
import sys
from pathlib import Path
from typing import NoReturn, TypeVar

from pydantic import Field, FilePath, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.kit.telemetry.log import Level
from services.kit.transport import Certificates, Transport

BAD_SETTINGS_EXIT_CODE = 78  # EX_CONFIG of sysexits.h
# What Kubernetes tells all processes of each Service: one named `evenflow-gateway` has our prefix.
SERVICE_LINK = re.compile(
    r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*"
    r"|.*_PORT=(tcp|udp|sctp)://.*"
)


class ServiceSettings(BaseSettings):
    """What every service can be told. Subclasses set their own `env_prefix`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"  # address that all ports of this process bind to
    metrics_port: int = Field(default=0, ge=0, le=65535)  # Prometheus endpoint; 0 picks a free port
    log_level: Level = "info"
    drain_timeout_s: float = Field(default=10.0, ge=0)  # given to live calls after SIGTERM
    # Between pings on every gRPC connection; a peer that owes an answer for as long is dead.
    # The same in all processes.
    grpc_keepalive_s: float = Field(default=10.0, ge=0.2, le=3600)
    # PEM files, all three or none: mutual TLS between services. Each shows its certificate, and
    # talks to no process without one of the CA.
    tls_cert_file: FilePath | None = None
    tls_key_file: FilePath | None = None
    tls_ca_file: FilePath | None = Field(default=None, validate_default=True)
    # "gateway,executor": names of which a client's certificate must bear one, as a subject
    # alternative name, to call this process; empty: any of the CA will do.
    tls_client_names: str = Field(default="", validate_default=True)

    @field_validator("tls_ca_file")
    @classmethod
    def _check_tls(cls, ca_file: Path | None, info: ValidationInfo) -> Path | None:
        files = (info.data.get("tls_cert_file"), info.data.get("tls_key_file"), ca_file)
        if any(files) and not all(files):
            raise ValueError("tls_cert_file, tls_key_file and tls_ca_file go together")
        return ca_file

    @field_validator("tls_client_names")
    @classmethod
    def _check_client_names(cls, names: str, info: ValidationInfo) -> str:
        if names and info.data.get("tls_ca_file") is None:
            raise ValueError("means nothing without tls_ca_file")
        return names

    @property
    def transport(self) -> Transport:
        """Return how this process talks to other services."""
        certificates = None
        if self.tls_ca_file is not None:
            certificates = Certificates(
                cert_file=str(self.tls_cert_file),
                key_file=str(self.tls_key_file),
                ca_file=str(self.tls_ca_file),
            )
        names = (name.strip() for name in self.tls_client_names.split(","))
        return Transport(
            certificates=certificates,
            client_names=frozenset(name for name in names if name),
            keepalive_s=self.grpc_keepalive_s,
        )


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def load(settings_class: type[SettingsT]) -> SettingsT:
    """Read settings from the environment, or stop the process naming each bad variable.

    A variable with the class's prefix that no setting has is a bad one, most likely mistyped,
    unless it is one of Kubernetes' service links.
    """
    prefix = settings_class.model_config.get("env_prefix", "")
    known = {f"{prefix}{name}".upper() for name in settings_class.model_fields}
    problems = [
        f"{name}: there is no such setting"
        for name, value in sorted(os.environ.items())
        if name.startswith(prefix)
        and name not in known
        and not SERVICE_LINK.fullmatch(f"{name}={value}")
    ]
    try:
        settings = settings_class()
    except ValidationError as error:
        problems += [f"{prefix}{_name(e['loc'])}: {e['msg']}" for e in error.errors()]
    if problems:
        refuse(*problems)
    return settings


def refuse(*problems: str) -> NoReturn:
    """Stop the process for variables that are bad, each a sentence that names one."""
    print("\n".join(problems), file=sys.stderr)
    sys.exit(BAD_SETTINGS_EXIT_CODE)


def _name(location: tuple[int | str, ...]) -> str:
    return str(location[0]).upper()
