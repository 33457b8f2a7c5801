"""`evenflow watch`: what an engine's scheduler sees, live."""

import click

from cli.client.engine_view import display_for
from cli.client.engine_watch import EngineWatch, WatchError
from cli.local.stacks import NoStackError, only_stack
from cli.serve import NAMED, ending_in_sentences

UPDATES_PER_S = 8.0


@click.command("watch")
@click.option("--executor", metavar="HOST:PORT", help="its gRPC address; the local stack's")
@NAMED
def command(executor: str | None, name: str | None) -> None:
    """Show requests, deposits, layers and steps of an engine, until Ctrl-C."""
    with ending_in_sentences():
        engine = EngineWatch(executor or _local_executor(name), updates_per_s=UPDATES_PER_S)
        display = display_for()
        try:
            for state in engine.states():
                display.show(state)
        except WatchError as error:
            raise click.ClickException(str(error)) from error
        finally:
            display.close()


def _local_executor(name: str | None) -> str:
    """Return the gRPC address of a local stack's executor. Raises NoStackError."""
    settings = only_stack(name)
    if settings is None:
        raise NoStackError(
            "no stack runs here: `evenflow serve MODEL` starts one, and --executor HOST:PORT "
            "watches an executor elsewhere"
        )
    return settings.address("executor")
