"""What must be equal on all nodes of an engine, and how nodes differ.

Places may differ: a model's directory is known by its files. Imports vLLM: seconds.
"""

import json
import platform
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from services.executor.settings import ExecutorSettings

LEADER_RANK = 0
PREFIX = "EVENFLOW_EXECUTOR_"
CODE = Path(__file__).resolve().parents[2]  # `services`
LIBRARIES = ("torch", "transformers", "grpcio", "numpy")
# Settings of a node, of its process, or of the leader's front alone.
OF_THE_NODE = frozenset(
    {
        "host",
        "grpc_port",
        "metrics_port",
        "log_level",
        "drain_timeout_s",
        "id",
        "advertised_address",
        "tracker",
        "otlp_traces_endpoint",
        "planner_address",
        "run_log",
        "kv_events_endpoint",
        "kv_events_topic",
        "kv_retention_tools_s",
        "tls_cert_file",
        "tls_key_file",
        "tls_ca_file",
        "tls_client_names",
        "node_rank",
        "nodes_timeout_s",
    }
)
PLACES = frozenset({"model", "tokenizer"})  # compared by what is there
# Compared, and shown, by their digest: they may hold a token, or are long.
UNSHOWN, MAX_VALUE_LENGTH = frozenset({"engine_args"}), 64


def facts_of(settings: ExecutorSettings) -> dict[str, str]:
    """Return a node's facts by name. Reads the model's files: seconds at most. Raises
    UnsupportedError for engine options that vLLM does not take.
    """
    told = settings.model_dump(mode="json", exclude={*OF_THE_NODE, *PLACES})
    facts = {f"{PREFIX}{name.upper()}": _shown(name, value) for name, value in told.items()}
    for name in PLACES:
        place = getattr(settings, name)
        facts[f"files of {PREFIX}{name.upper()}"] = _digest_at(place, settings.revision)
    drafts = _speculative_config(settings)
    facts["files of what makes drafts"] = _digest_at(drafts.get("model"), drafts.get("revision"))
    facts |= {f"version of {name}": version(name) for name in LIBRARIES}
    facts["version of vllm"] = _vllm_version()
    facts["version of python"] = ".".join(platform.python_version_tuple()[:2])
    facts["digest of evenflow"] = _code_digest()
    return facts


def differences(leader: Mapping[str, str], follower: Mapping[str, str], *, rank: int) -> list[str]:
    """Return what differs between the leader and the node of this rank, a sentence each."""
    names = sorted(leader.keys() | follower.keys())
    pairs = ((name, leader.get(name, "absent"), follower.get(name, "absent")) for name in names)
    return [
        f"{name} is {one} on node {LEADER_RANK} and {other} on node {rank}"
        for name, one, other in pairs
        if one != other
    ]


def _shown(name: str, value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    if name not in UNSHOWN and len(text) <= MAX_VALUE_LENGTH:
        return text
    return sha256(text.encode()).hexdigest()[:16]


def _speculative_config(settings: ExecutorSettings) -> dict[str, Any]:
    from services.executor.engine.options import read_engine_options

    given = read_engine_options(settings.engine_args) if settings.engine_args else {}
    return given.get("speculative_config") or {}


def _digest_at(name: str | None, revision: str | None) -> str:
    """Return what stands for the files of a model; its name where they are not there yet."""
    from services.executor.engine.fingerprint import digest_of_files, find

    if name is None:
        return ""
    place = find(name, revision, None)
    return digest_of_files(place)[:16] if place is not None else f"not on this node: {name}"


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def _code_digest() -> str:
    """Return what stands for the sources: steps travel between nodes as pickled objects."""
    digest = sha256()
    for file in sorted(CODE.rglob("*.py")):
        digest.update(str(file.relative_to(CODE)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
