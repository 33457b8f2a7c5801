"""What the gateway can be told: `EVENFLOW_GATEWAY_*`."""

import re
import socket
from pathlib import Path

from pydantic import Field, FilePath, SecretStr, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from services.gateway.access.api_keys import parse_api_keys
from services.gateway.access.hosts import ANY_HOST, HOST_PATTERN, Hosts, is_loopback
from services.gateway.access.terms import DefaultRate, SloFloors
from services.kit.redis_url import RedisUrl
from services.kit.rpc import VALID_REQUEST_ID
from services.kit.settings import ServiceSettings
from services.kit.telemetry.tracing import OtlpEndpoint
from services.kit.transport import Certificates, Transport

MAX_EDGE_MESSAGE_BYTES = 16 << 20  # of gRPC; the prompt of a context of a million tokens fits

_ADDRESS = re.compile(r"[^\s:,]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")


_DNS, _TRACKER = "dns:", "tracker:"

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,@?#]+")


def _checked_address(address: str) -> str:
    if not _ADDRESS.fullmatch(address) or int(address.rsplit(":", 1)[1]) > 65535:
        raise ValueError(f'"{address}" is not host:port')
    return address


class GatewaySettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="EVENFLOW_GATEWAY_")

    http_port: int = Field(default=8000, ge=0, le=65535)  # OpenAI API; 0 picks a free port
    grpc_port: int = Field(default=50050, ge=0, le=65535)  # 0 picks a free port
    metrics_port: int = Field(default=9050, ge=0, le=65535)  # 0 picks a free port
    # "host:port,dns:NAME:PORT,tracker:", at least one: addresses, names of which each address is an
    # executor, and all that hold a lease of the tracker.
    executors: str = "127.0.0.1:50051"
    tracker: str = "127.0.0.1:50053"  # host:port; empty: progress is not recorded
    # Stable name; empty: host name and HTTP port, so give one if that port is 0.
    id: str = Field(default="", pattern=f"^({VALID_REQUEST_ID.pattern})?$")
    # After SIGTERM: to serve on without being ready, longer than a load balancer takes to notice;
    # then for live requests to end, which takes as long as they are read.
    lame_duck_s: float = Field(default=0.0, ge=0)
    drain_timeout_s: float = Field(default=300.0, ge=0)
    max_live_requests: int = Field(default=1024, ge=1)  # above it: 429
    # Where API keys stand, as TOML; both unset: no key is asked for. A bad file stops the
    # start; later, and from Redis, what cannot be read leaves the keys that are known.
    api_keys_file: FilePath | None = None
    api_keys_redis_url: RedisUrl | None = None
    # The address that clients use, where it is not `host`: a container's port is published.
    published_host: str = ""
    # Without keys only this machine may call, unless this says that any may.
    open: bool = Field(default=False, validate_default=True)
    api_keys_refresh_s: float = Field(default=5.0, ge=0.1)  # until a change is seen
    # The tightest bounds that may be stated, as JSON, by model: {"MODEL": {"min_slo_tbt_s": 0.02}}.
    slo_floors: dict[str, SloFloors] = Field(default_factory=dict)
    # At which streamed answers to chats without tools are read whose clients state no pace: tokens
    # per second as JSON, by model: {"MODEL": 5.2}. Nothing is kept back for it.
    default_reading_rate_tps: dict[str, DefaultRate] = Field(default_factory=dict)
    # Names by which clients may call over HTTP, beside this machine's for itself,
    # "llm.example,*.llm.example", or "*" for any. Empty: without API keys, where `host` or
    # `published_host` is a loopback address, no others, or any web page could call; else any.
    allowed_hosts: str = ""
    # HTTP connections. Each is given so long to complete a head, and to complete a body beyond what
    # that takes at 16 KiB per second; after an answer it may stay idle so long.
    http_head_timeout_s: float = Field(default=10.0, gt=0)
    http_body_timeout_s: float = Field(default=30.0, gt=0)
    http_idle_timeout_s: float = Field(default=75.0, gt=0)  # longer than that of a proxy in front
    max_connections: int = Field(default=4096, ge=1)  # above it: 503
    max_connections_per_address: int = Field(default=2048, ge=1)  # a proxy in front is one address
    submit_timeout_s: float = Field(default=30.0, gt=0)  # for an executor to accept or reject
    # Origins whose pages may call from a browser, "https://a.example,http://localhost:3000", or "*"
    # for all; empty: none.
    cors_origins: str = ""
    ui: bool = True  # serve the page at /ui; false: 404
    sse_keepalive_s: float = Field(default=15.0, ge=0)  # comment in a silent stream; 0: none
    # Tokens that are due and that a reader has not taken, from which its generation is held.
    max_undelivered_tokens: int = Field(default=256, ge=1)
    # Memory of one stream's tokens that are not due yet, from which its generation is held.
    max_deposit_bytes: int = Field(default=4 << 20, ge=1 << 10)
    # After generation a stream may keep its pace for so long; the rest then comes at once.
    max_pace_tail_s: float = Field(default=600.0, ge=0)
    # A reader that takes nothing for so long is given up, and its connection is cut after twice as
    # long, unless 16 KiB per second of what waits are read; shorter than the executor's
    # EVENFLOW_EXECUTOR_KV_MAX_PAUSE_S, after which a hold ends by itself.
    reader_timeout_s: float = Field(default=30.0, gt=0)
    # An answer whose executor is lost goes on at another, or at the same when it is back: for so
    # long one is looked for, while its reader gets what is there; 0: it ends with an error at once.
    failover_timeout_s: float = Field(default=60.0, ge=0)
    failover_max_tokens: int = Field(default=1 << 17, ge=0)  # longer answers end with an error
    failover_across_numerics: bool = True  # also between executors that round differently
    # An executor that goes on with an answer generates so many of its tokens again; where they
    # differ, the answer ends with an error. It finds a wrong model or broken KV, and costs steps.
    failover_overlap_tokens: int = Field(default=0, ge=0, le=64)
    # Streams that ask for it are kept for so long after their readers left, in so much memory, of
    # which each API key may have half.
    resume_window_s: float = Field(default=60.0, gt=0)
    resume_max_bytes: int = Field(default=256 << 20, ge=1 << 20)
    # An executor that says how many steps its engine makes is taken for dead after so long without
    # a message, of which one a second is promised, or without a step, though readers wait.
    link_stall_s: float = Field(default=3.0, ge=2)
    engine_stall_s: float = Field(default=60.0, gt=0)
    tracker_flush_timeout_s: float = Field(default=2.0, ge=0)  # for last counts at shutdown
    otlp_traces_endpoint: OtlpEndpoint = ""  # where traces go; empty: there are none

    # PEM files of the public edge, HTTP and gRPC; unset: plain text. With a CA, clients must show
    # a certificate of it.
    edge_cert_file: FilePath | None = None
    edge_key_file: FilePath | None = Field(default=None, validate_default=True)
    edge_ca_file: FilePath | None = Field(default=None, validate_default=True)

    @field_validator("api_keys_file", mode="before")
    @classmethod
    def _check_named(cls, file: Path | str | None) -> Path | str | None:
        return file or None

    @field_validator("api_keys_file")
    @classmethod
    def _check_api_keys(cls, file: Path | None) -> Path | None:
        if file is not None:
            parse_api_keys(file.read_text("utf-8"))
        return file

    @field_validator("api_keys_redis_url")
    @classmethod
    def _check_one_source(cls, url: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if url is not None and info.data.get("api_keys_file") is not None:
            raise ValueError("not together with api_keys_file")
        return url

    @field_validator("open")
    @classmethod
    def _check_open(cls, is_open: bool, info: ValidationInfo) -> bool:
        asks = info.data.get("api_keys_file") or info.data.get("api_keys_redis_url")
        host = info.data.get("published_host") or info.data.get("host", "")
        if not (is_open or asks or is_loopback(host)):
            rule = "set api_keys_file or api_keys_redis_url, or this to true"
            raise ValueError(f"anybody could call at {host}; {rule}")
        return is_open

    @field_validator("edge_key_file", "edge_ca_file")
    @classmethod
    def _check_edge(cls, file: Path | None, info: ValidationInfo) -> Path | None:
        has_cert = info.data.get("edge_cert_file") is not None
        if file is None and has_cert and info.field_name == "edge_key_file":
            raise ValueError("edge_cert_file needs it")
        if file is not None and not has_cert:
            raise ValueError("means nothing without edge_cert_file")
        return file

    @property
    def edge_transport(self) -> Transport:
        """Return how clients talk to this gateway."""
        certificates = None
        if self.edge_cert_file is not None:
            certificates = Certificates(
                cert_file=str(self.edge_cert_file),
                key_file=str(self.edge_key_file),
                ca_file=str(self.edge_ca_file or ""),
            )
        return Transport(
            certificates=certificates,
            keepalive_s=self.grpc_keepalive_s,
            max_message_bytes=MAX_EDGE_MESSAGE_BYTES,
        )

    @field_validator("executors")
    @classmethod
    def _check_executors(cls, value: str) -> str:
        entries = [part.strip() for part in value.split(",")]
        for entry in entries:
            if entry != _TRACKER:
                _checked_address(entry.removeprefix(_DNS))
        if len(set(entries)) != len(entries):
            raise ValueError("an address is listed twice")
        return ",".join(entries)

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: str) -> str:
        origins = [part.strip() for part in value.split(",")] if value else []
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f'"{origin}" is not scheme://host or scheme://host:port')
        return ",".join(origins)

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, value: str) -> str:
        hosts = [part.strip() for part in value.split(",")] if value else []
        for host in hosts:
            if not HOST_PATTERN.fullmatch(host):
                raise ValueError(f'"{host}" is not the name of a host, without a port')
        return ",".join(hosts)

    @field_validator("tracker")
    @classmethod
    def _check_tracker(cls, value: str, info: ValidationInfo) -> str:
        if not value and _TRACKER in info.data.get("executors", "").split(","):
            raise ValueError(f'executors has "{_TRACKER}", which needs it')
        return value and _checked_address(value)

    @property
    def hosts(self) -> Hosts:
        """Return the names by which clients may call over HTTP."""
        asks_for_keys = self.api_keys_file is not None or self.api_keys_redis_url is not None
        is_local = is_loopback(self.host) or is_loopback(self.published_host)
        if not self.allowed_hosts and (asks_for_keys or not is_local):
            return ANY_HOST
        return Hosts([*self.allowed_hosts.split(","), self.host, self.published_host])

    @property
    def executor_addresses(self) -> tuple[str, ...]:
        """Return the addresses that are stated."""
        entries = self.executors.split(",")
        return tuple(one for one in entries if one != _TRACKER and not one.startswith(_DNS))

    @property
    def asks_tracker(self) -> bool:
        """Say whether executors are those that hold a lease of the tracker."""
        return _TRACKER in self.executors.split(",")

    @property
    def executor_names(self) -> tuple[tuple[str, int], ...]:
        """Return hosts' names and ports of which each address is an executor."""
        found = [
            one.removeprefix(_DNS) for one in self.executors.split(",") if one.startswith(_DNS)
        ]
        return tuple((name, int(port)) for name, _, port in (one.rpartition(":") for one in found))

    @property
    def name(self) -> str:
        """Return the name that executors and tracker know this gateway by."""
        return self.id or f"{socket.gethostname()}:{self.http_port}"
