"""`evenflow watch`: what an engine's scheduler sees, live."""

import click

from cli.client.engine_view import display_for
from cli.client.engine_watch import EngineWatch, WatchError
from cli.local.settings import running_settings
from cli.serve import ending_in_sentences

UPDATES_PER_S = 8.0


@click.command("watch")
@click.option("--executor", metavar="HOST:PORT", help="its gRPC address; the local stack's")
def command(executor: str | None) -> None:
    """Show requests, deposits, layers and steps of an engine, until Ctrl-C."""
    with ending_in_sentences():
        engine = EngineWatch(
            executor or running_settings().address("executor"), updates_per_s=UPDATES_PER_S
        )
        display = display_for()
        try:
            for state in engine.states():
                display.show(state)
        except WatchError as error:
            raise click.ClickException(str(error)) from error
        finally:
            display.close()
