"""`evenflow simulate` and `evenflow size`: the simulator's own command line."""

import click

UNREAD = {"ignore_unknown_options": True}


@click.command("simulate", add_help_option=False, context_settings=UNREAD)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def simulate(arguments: tuple[str, ...]) -> None:
    """Run policies x rates x SLOs on one workload in virtual time."""
    _run("simulate", arguments)


@click.command("size", add_help_option=False, context_settings=UNREAD)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def size(arguments: tuple[str, ...]) -> None:
    """Find how many readers a GPU holds at once."""
    _run("size", arguments)


def _run(name: str, arguments: tuple[str, ...]) -> None:
    from simulator.cli import app

    app([name, *arguments], prog_name="evenflow")
