"""The two stacks of the demo: Evenflow with layer-wise KV, and stock vLLM's policy beside it."""

import json
import random
import socket
from contextlib import suppress
from pathlib import Path

from cli.local.settings import PORTS, StackSettings, read_settings
from cli.local.stacks import placed
from demo.model import MODEL_ID

POOL_TOKENS = 704  # of all layers: a third of the long prompt
BLOCK_SIZE = 32  # tokens
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2}
HOST_BYTES = 512 << 20
QUIET_PORTS = range(10_000, 18_000)  # below what Linux gives to outgoing connections
LAYERWISE = {
    "EVENFLOW_EXECUTOR_LAYERWISE_KV": "true",
    "EVENFLOW_EXECUTOR_KV_HOST_MEMORY_BYTES": str(HOST_BYTES),
    "EVENFLOW_EXECUTOR_MAX_MODEL_LEN": "4096",
}


def evenflow(model: Path, dtype: str) -> StackSettings:
    """Return the stack that the demo shows and leaves running; the user's own settings win."""
    settings = read_settings()
    return placed(settings.having({**_engine(model, dtype), **LAYERWISE, **settings.variables}))


def stock(beside: StackSettings) -> StackSettings:
    """Return the same engine under vLLM's own policy, on free ports."""
    ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
    return StackSettings(
        state_dir=beside.run_dir,  # it is no stack to be found by a user
        stated_name="stock",
        redis_url="",
        ports=ports,
        variables={
            **beside.variables,
            "EVENFLOW_EXECUTOR_POLICY": "vllm",
            "EVENFLOW_EXECUTOR_LAYERWISE_KV": "false",
            "EVENFLOW_EXECUTOR_MAX_MODEL_LEN": "auto",  # what the pool holds: stock vLLM asks that
        },
    )


def _engine(model: Path, dtype: str) -> dict[str, str]:
    return {
        "EVENFLOW_EXECUTOR_MODEL": str(model),
        "EVENFLOW_EXECUTOR_SERVED_MODEL_NAME": MODEL_ID,
        "EVENFLOW_EXECUTOR_DTYPE": dtype,
        "EVENFLOW_EXECUTOR_BLOCK_SIZE": str(BLOCK_SIZE),
        "EVENFLOW_EXECUTOR_KV_CACHE_MEMORY_BYTES": str(POOL_TOKENS * bytes_per_token(model, dtype)),
        "EVENFLOW_EXECUTOR_ENFORCE_EAGER": "true",  # starts faster than a compiled model
        "EVENFLOW_EXECUTOR_TOOL_CALL_PARSER": "hermes",  # the form of calls in its chat template
        "EVENFLOW_GATEWAY_HOST": "127.0.0.1",
    }


def bytes_per_token(model: Path, dtype: str) -> int:
    """Return the KV bytes of a token, all layers."""
    config = json.loads((model / "config.json").read_text())
    values = 2 * config["num_key_value_heads"] * config["head_dim"]
    return int(config["num_hidden_layers"] * values * BYTES_PER_VALUE[dtype])


def _free_ports(number: int) -> list[int]:
    """Return ports that nobody has, and that no outgoing connection is given."""
    found: list[int] = []
    for port in random.sample(QUIET_PORTS, len(QUIET_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == number:
            return found
    raise OSError(f"no {number} free ports in {QUIET_PORTS}")
