"""What the executor can be told: `EVENFLOW_EXECUTOR_*`.

Engine options carry vLLM's names and meaning; unset ones are left to vLLM.
"""

import math
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from services.control.measures.rates import MAX_MIRRORED_BLOCKS
from services.executor.kv_options import (
    AUTO,
    FREE_MEMORY_SHARE,
    Amount,
    GuardMode,
    HostBytes,
    LayersPerGroup,
    Limit,
    Rate,
    Share,
    StagingBuffers,
)
from services.kit.rpc import VALID_REQUEST_ID
from services.kit.settings import ServiceSettings
from services.kit.telemetry.tracing import OtlpEndpoint
from services.kit.transport import Transport
from services.placement.presets import loadable, preset_of

NO_PLANNING = "vllm"
DEFAULT_POLICY = "evenflow"
UNPIN_BYTES_PER_S = 5e9  # at least: a process that is killed before it hangs in the kernel
WORKER_SHUTDOWN_S = 5  # as in vLLM: for an orderly end that has nothing to unpin
# The same of an engine over several nodes: where one is lost, ranks wait and do not end orderly.
NODE_SHUTDOWN_S = 1


# How vLLM's command line starts an engine on several nodes, and what does so here.
NODE_OPTIONS = frozenset(
    {"--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"}
)
NODE_SETTINGS = ", ".join(
    f"EVENFLOW_EXECUTOR_{name}" for name in ("NODES", "NODE_RANK", "LEADER_ADDRESS")
)
# Between two pings of nodes of one engine, which end with each other: within twice as long.
NODE_KEEPALIVE_S = 2.0

PolicyName = Annotated[str, AfterValidator(loadable)]


class ExecutorSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="EVENFLOW_EXECUTOR_")

    grpc_port: int = Field(default=50051, ge=0, le=65535)  # 0 picks a free port
    metrics_port: int = Field(default=9051, ge=0, le=65535)  # 0 picks a free port
    # Stable name, by default the host's: two executors on one host each need their own.
    id: str = Field(default_factory=socket.gethostname, pattern=f"^{VALID_REQUEST_ID.pattern}$")
    advertised_address: str = ""  # "host:port" for gateways; empty: `host`, or this host's name
    tracker: str = "127.0.0.1:50053"  # "host:port"; empty: report to none
    otlp_traces_endpoint: OtlpEndpoint = ""  # where traces go; empty: there are none

    model: str = Field(min_length=1)  # directory or hub id
    served_model_name: str = ""  # id that requests name; empty: last part of `model`
    tokenizer: str | None = None  # directory or hub id; unset: the model's own
    revision: str | None = None
    # Low-rank adapters by the ids that requests name, as JSON: {"ID": "directory or hub id"}.
    lora_modules: dict[str, str] = Field(default_factory=dict)
    trust_remote_code: bool = False
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    quantization: str | None = None
    # Tokens; unset: what the model allows; "auto": the same, cut to what the KV pool holds.
    max_model_len: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    seed: int = 0
    # vLLM's engine options that have no setting here, as its command line has them (a JSON list).
    engine_args: tuple[str, ...] = ()

    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    distributed_executor_backend: Literal["mp", "ray"] | None = None
    # One engine over several nodes (docs/nodes.md): this process leads and serves, each other node
    # runs `python -m services.executor.follower` with the same settings and a rank of its own.
    nodes: int = Field(default=1, ge=1)
    node_rank: int = Field(default=0, ge=0)  # in [0, nodes); 0: the leader
    # "host:port" of the leader's gRPC port, as its followers reach it; the same on all nodes.
    leader_address: str = Field(default="", validate_default=True)
    nodes_timeout_s: float = Field(default=600.0, gt=0)  # of nodes' waiting for each other
    max_num_seqs: int | None = Field(default=None, ge=1)  # requests in one step
    max_num_batched_tokens: int | None = Field(default=None, ge=1)  # tokens in one step
    max_num_queued_reqs: int = Field(default=1024, ge=1)  # live requests; more are refused
    # Which request is served first: the one that came first, or the one with the lower `priority`.
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    # Of a processor, to compile the form of an answer.
    grammar_timeout_s: float = Field(default=5.0, gt=0, le=60)
    # By the clock, until a request is refused whose form could not be compiled yet; below the
    # gateways' `submit_timeout_s`.
    grammar_wait_s: float = Field(default=20.0, gt=0)
    # How the model writes calls of functions and what it thinks: names of vLLM's parsers; empty:
    # neither is told from text.
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    enforce_eager: bool = False
    # Requests begin with the KV of earlier ones: in the pool, with layer-wise KV on the host.
    # Unset: yes, where it works.
    enable_prefix_caching: bool | None = None
    # "tcp://*:PORT" to listen, "tcp://HOST:PORT" to call a listener: ZeroMQ, where vLLM tells which
    # blocks of its own prefix cache come and go (docs/kubernetes.md); empty: it tells none.
    kv_events_endpoint: str = Field(default="", pattern=r"^(tcp://.+:\d+)?$")
    kv_events_topic: str = ""  # of what it tells

    block_size: int | None = Field(default=None, ge=1)  # tokens
    num_gpu_blocks_override: int | None = Field(default=None, ge=1)
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    # KV pool per worker. Unset: what `gpu_memory_utilization` leaves; 1 GiB on a CPU.
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)

    # Layer-wise KV: part of a running request's KV lives in host memory.
    layerwise_kv: bool = False
    kv_layers_per_group: LayersPerGroup = 1  # contiguous layers that move together
    kv_staging_buffers: StagingBuffers = 2  # per request with offloaded layers
    # Per worker. "auto": twice that of its pool, at most its share of half of what is free.
    kv_host_memory_bytes: HostBytes = AUTO
    # At most; 0: no write-through.
    kv_mirrored_blocks_per_step: Amount = MAX_MIRRORED_BLOCKS
    kv_max_pause_s: Limit = 60.0  # a request whose reader has stopped runs again after this
    # Of the host, what one API key's clients may have kept (docs/agents.md): at once; and times the
    # seconds still to come.
    kv_retention_frac: Share = 0.25
    kv_retention_host_s: Rate = 900.0
    # At most so long the KV of an answer that ended with a tool call is kept for the next turn, for
    # as long as such calls have taken; 0: as that of others.
    kv_retention_tools_s: Rate = 600.0
    kv_link_bytes_per_s: Rate = 0.0  # modelled link on a CPU; 0: memory speed
    # Which blocks are checked when they come back from the host.
    kv_integrity_guard: GuardMode = GuardMode.SAMPLE
    # Beyond what its bytes take, until a copy counts as hung.
    kv_copy_timeout_s: Limit = 30.0

    # What decides what runs and where KV is. Unset: `evenflow` with layer-wise KV, else `vllm`.
    # `vllm` switches layer-wise KV off; those that place layers need it.
    policy: PolicyName | None = None
    shadow_policy: PolicyName | None = None  # only compared with the policy that acts
    # Fairness ids have equal shares of the KV pool; under `evenflow` only.
    fairness: bool = Field(default=False, validate_default=True)
    fairness_half_life_s: float = Field(default=300.0, gt=0)  # of what an id has attained
    run_log: Path | None = None  # file that each run decision is appended to, with its input
    planner_address: str = "127.0.0.1:50052"  # "host:port"; empty: only the local heuristic acts
    plan_timeout_s: float = Field(default=1.0, gt=0, le=60)  # of one question to the planner
    plan_mismatch_frac: float = Field(default=0.15, ge=0)  # steps unlike predicted; 0: any will do
    plan_deposit: bool | None = None  # deposited tokens back plans; unset: the policy's choice
    plan_alpha: float = Field(default=0.0, ge=0)  # SLO violations per step, mean over the window
    plan_min_window: int = Field(default=1, ge=1, le=4096)  # decode steps
    plan_max_window: int = Field(default=256, ge=1, le=4096)  # decode steps
    plan_min_pause_s: float = Field(default=1.0, ge=0)
    plan_max_pause_s: float = Field(default=10.0, gt=0, le=60)  # none is paused longer for an SLO
    # Of `ellm`: the share of KV that is computed anew in every step; unset: the best.
    ellm_uncached_frac: float | None = Field(default=None, ge=0, le=1)

    @field_validator("lora_modules")
    @classmethod
    def _check_adapters(cls, modules: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        model = info.data.get("served_model_name") or Path(info.data.get("model", "")).name
        if model in modules or not all(name and path for name, path in modules.items()):
            raise ValueError(f"an adapter has an id, not {model}, and a place")
        return modules

    @field_validator("engine_args")
    @classmethod
    def _check_engine_args(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        names = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
        if given := sorted(names & NODE_OPTIONS):
            raise ValueError(f"{', '.join(given)}: set {NODE_SETTINGS} instead")
        return arguments

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, nodes: int, info: ValidationInfo) -> int:
        if nodes == 1:
            return nodes
        sizes = (info.data.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
        num_ranks = math.prod(sizes)
        if num_ranks % nodes:
            raise ValueError(f"{num_ranks} ranks (tensor x pipeline) do not divide by {nodes}")
        if info.data.get("lora_modules"):
            raise ValueError("adapters over several nodes have not been compared with one node")
        return nodes

    @field_validator("node_rank")
    @classmethod
    def _check_node_rank(cls, rank: int, info: ValidationInfo) -> int:
        if rank >= (nodes := info.data.get("nodes", rank + 1)):
            raise ValueError(f"is not below the number of nodes, {nodes}")
        return rank

    @field_validator("leader_address")
    @classmethod
    def _check_leader(cls, address: str, info: ValidationInfo) -> str:
        host, _, port = address.rpartition(":")
        if info.data.get("nodes", 1) > 1 and not (host and port.isdecimal()):
            raise ValueError("must be the leader's host:port where there are several nodes")
        return address

    @field_validator("distributed_executor_backend")
    @classmethod
    def _check_backend(cls, backend: str | None) -> str | None:
        if backend == "ray":
            raise ValueError(
                f'"ray" is in no image of Evenflow: for several nodes set {NODE_SETTINGS}'
            )
        return backend

    @property
    def acting_policy(self) -> str:
        """Return the policy in force."""
        return self.policy or _default_policy(layerwise_kv=self.layerwise_kv)

    @property
    def uses_layerwise_kv(self) -> bool:
        """Return whether KV is kept layer by layer."""
        return self.layerwise_kv and self.acting_policy != NO_PLANNING

    @property
    def transport(self) -> Transport:
        """Return how this process talks to others; to nodes of its engine no less often."""
        transport = super().transport
        if self.nodes == 1:
            return transport
        return replace(transport, keepalive_s=min(transport.keepalive_s, NODE_KEEPALIVE_S))

    @property
    def unpin_s(self) -> float:
        """Return how long a node's ranks on a GPU may take to give their host memory back."""
        if not self.uses_layerwise_kv:
            return 0.0
        if self.kv_host_memory_bytes == AUTO:
            total_bytes: int = psutil.virtual_memory().total
            return FREE_MEMORY_SHARE * total_bytes / UNPIN_BYTES_PER_S
        num_ranks = self.tensor_parallel_size * self.pipeline_parallel_size // self.nodes
        return num_ranks * self.kv_host_memory_bytes / UNPIN_BYTES_PER_S

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str | None, info: ValidationInfo) -> str | None:
        if policy is None or info.data.get("layerwise_kv"):
            return policy
        if preset_of(policy).needs_layers:
            raise ValueError(f"{policy} needs EVENFLOW_EXECUTOR_LAYERWISE_KV=true")
        if policy != NO_PLANNING and info.data.get("scheduling_policy") == "priority":
            raise ValueError(f"{policy} does not work with scheduling_policy=priority")
        return policy

    @field_validator("fairness")
    @classmethod
    def _check_fairness(cls, fairness: bool, info: ValidationInfo) -> bool:
        if not fairness or "policy" not in info.data:
            return fairness
        policy = info.data["policy"] or _default_policy(layerwise_kv=info.data.get("layerwise_kv"))
        if not preset_of(policy).has_shares:
            raise ValueError(f"{policy} knows no shares of fairness ids")
        return fairness

    @field_validator("plan_max_window", "plan_max_pause_s")
    @classmethod
    def _check_order(cls, most: float, info: ValidationInfo) -> float:
        least = info.data.get(str(info.field_name).replace("max", "min"), most)
        if most < least:
            raise ValueError(f"is below the least, {least}")
        return most

    @property
    def model_id(self) -> str:
        """Return the id under which the model is served."""
        return self.served_model_name or Path(self.model).name


def _default_policy(*, layerwise_kv: bool | None) -> str:
    return DEFAULT_POLICY if layerwise_kv else NO_PLANNING


def prepare_engine_environment(settings: ExecutorSettings) -> None:
    """Set what vLLM reads from the environment only. Call before vLLM is imported."""
    # A fork would copy the threads' locks of the gRPC server that already runs.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # So long its processes wait for each other's end before they kill.
    orderly_s = WORKER_SHUTDOWN_S if settings.nodes == 1 else NODE_SHUTDOWN_S
    shutdown_s = orderly_s + math.floor(settings.unpin_s)
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(shutdown_s))
    os.environ.setdefault("OTEL_SERVICE_NAME", "evenflow-engine")  # on the engine's own spans


def set_rank_address(address: str, interface: str) -> None:
    """Have this node's ranks listen at an address, and use its interface, unless told otherwise."""
    os.environ.setdefault("VLLM_HOST_IP", address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
