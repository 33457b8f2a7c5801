"""All executors of a tracker, with their requests, as a gateway shows them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table

from cli.client.endpoint import Endpoint

MAX_REQUESTS = 40  # that are shown
UNKNOWN = "?"

Executor: TypeAlias = Mapping[str, Any]  # an entry of `GET /v1/evenflow/fleet`


def read_fleet(endpoint: Endpoint) -> Sequence[Executor]:
    """Return what a gateway's tracker knows of now. Raises AnswerError."""
    executors: Sequence[Executor] = endpoint.of_gateway("/v1/evenflow/fleet", "executors")[
        "executors"
    ]
    return executors


def fleet_picture(executors: Sequence[Executor]) -> RenderableType:
    """Return two tables: executors, and the requests that they have."""
    return Group(_executors(executors), _requests(executors))


def _executors(executors: Sequence[Executor]) -> Table:
    table = Table("executor", "address", "model", box=None, header_style="dim")
    for name in ("run", "new", "wait", "KV", "read", "in hand", "requests"):
        table.add_column(name, justify="right")
    for one in executors:
        load = one["load"]
        table.add_row(
            one["executor_id"],
            one["address"],
            one["model"],
            str(load["num_running_reqs"]),
            str(load["num_newcomers"]),
            _wait(load),
            f"{load['kv_unavailable_frac']:.0%}",
            f"{load['reading_load_frac']:.0%}",
            f"{load['deposit_s']:.1f} s",
            str(len(one["requests"])),
        )
    return table


def _wait(load: Mapping[str, Any]) -> str:
    """Return how long a newcomer waits for those before it."""
    if not load["num_newcomer_tokens"]:
        return "0.0 s"
    if not load["prefill_tps"]:
        return UNKNOWN
    return f"{load['num_newcomer_tokens'] / load['prefill_tps']:.1f} s"


def _requests(executors: Sequence[Executor]) -> Table:
    found = [(one["executor_id"], request) for one in executors for request in one["requests"]]
    table = Table("request", "executor", "gateway", "state", box=None, header_style="dim")
    for name in ("prompt", "generated", "delivered", "in hand"):
        table.add_column(name, justify="right")
    for executor_id, request in found[:MAX_REQUESTS]:
        table.add_row(
            request["request_id"],
            executor_id,
            request["gateway_id"],
            request["state"],
            str(request["num_prompt_tokens"]),
            str(request["num_generated_tokens"]),
            str(request["num_delivered_tokens"]),
            str(request["num_deposited_tokens"]),
        )
    if len(found) > MAX_REQUESTS:
        table.add_row(f"and {len(found) - MAX_REQUESTS} more")
    return table
