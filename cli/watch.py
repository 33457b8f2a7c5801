"""`evenflow watch`: what an engine's scheduler sees, live; what all executors have, or their KV."""

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import click
from rich.console import Console, RenderableType
from rich.live import Live

from cli.client.endpoint import AnswerError, Endpoint, endpoint_at
from cli.client.engine_view import display_for
from cli.client.engine_watch import EngineWatch, WatchError
from cli.client.fleet import fleet_picture, read_fleet
from cli.client.kv_holders import holders_picture, read_holders
from cli.local.settings import StackSettings
from cli.local.stacks import NoStackError, only_stack
from cli.serve import NAMED, ending_in_sentences

UPDATES_PER_S = 8.0
GATEWAY_INTERVAL_S = 1.0
Picture: TypeAlias = Callable[[Endpoint], RenderableType]
VIEWS: Mapping[str, Picture] = MappingProxyType(
    {
        "fleet": lambda endpoint: fleet_picture(read_fleet(endpoint)),
        "kv": lambda endpoint: holders_picture(read_holders(endpoint)),
    }
)


@click.command("watch")
@click.option("--executor", metavar="HOST:PORT", help="its gRPC address; the local stack's")
@click.option(
    "--fleet", "view", flag_value="fleet", help="Show all executors, and what readers have in hand."
)
@click.option(
    "--kv",
    "view",
    flag_value="kv",
    help="Show which requests and sessions hold KV, and until when.",
)
@click.option("--url", help="With --fleet or --kv: a gateway's; the local stack's.")
@click.option(
    "--api-key",
    default="",
    envvar="OPENAI_API_KEY",
    show_envvar=True,
    help="Where the gateway asks for one; for --kv an admin's.",
)
@NAMED
def command(
    executor: str | None, view: str | None, url: str | None, api_key: str, name: str | None
) -> None:
    """Show requests, deposits, layers and steps of an engine, until Ctrl-C."""
    with ending_in_sentences():
        if view is None:
            _watch_engine(executor or _local_stack(name).address("executor"))
        else:
            endpoint = endpoint_at(url or _local_stack(name).base_url, api_key)
            _watch_gateway(VIEWS[view], endpoint)


def _watch_engine(executor: str) -> None:
    engine = EngineWatch(executor, updates_per_s=UPDATES_PER_S)
    display = display_for()
    try:
        for state in engine.states():
            display.show(state)
    except WatchError as error:
        raise click.ClickException(str(error)) from error
    finally:
        display.close()


def _watch_gateway(picture: Picture, endpoint: Endpoint) -> None:
    """Redraw what a gateway knows on a terminal, print it once elsewhere."""
    console = Console()
    try:
        if not console.is_terminal:
            console.print(picture(endpoint))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(picture(endpoint), refresh=True)
                time.sleep(GATEWAY_INTERVAL_S)
    except AnswerError as error:
        raise click.ClickException(str(error)) from error


def _local_stack(name: str | None) -> StackSettings:
    """Return a local stack's settings. Raises NoStackError."""
    settings = only_stack(name)
    if settings is None:
        raise NoStackError(
            "no stack runs here: `evenflow serve MODEL` starts one, --executor HOST:PORT "
            "watches an executor elsewhere, --fleet --url URL what a gateway's tracker knows, "
            "and --kv --url URL what holds the KV of its executors"
        )
    return settings
