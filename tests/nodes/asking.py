"""Asks an engine over nodes, and looks at what it has moved."""

import asyncio
import urllib.request
from collections.abc import Sequence

from evenflow.gateway.v1 import generation_pb2 as gen
from lab.engine.step_runner import Arrival
from lab.executor_client import ANSWER_TIMEOUT_S, Answer, GatewayStream
from tests.nodes.group import Group


async def ask(gateway: GatewayStream, arrivals: Sequence[Arrival]) -> dict[str, Answer]:
    """Return the answers to requests that are all sent at once."""
    tasks = {
        arrival.request_id: gateway.ask(
            arrival.request_id,
            token_ids=gen.TokenIds(ids=arrival.prompt),
            cache_salt=arrival.cache_salt,
            sampling={
                "temperature": 0,
                "max_tokens": arrival.num_output_tokens,
                "ignore_eos": True,
            },
        )
        for arrival in arrivals
    }
    return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))


def moved_bytes(group: Group) -> float:
    """Return the bytes that layer-wise KV has brought back from the hosts of both nodes."""
    url = f"http://127.0.0.1:{group.leader.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S) as page:
        lines = page.read().decode().splitlines()
    name = "vllm:evenflow_kv_h2d_bytes_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))
