"""The `evenflow` command. Subcommands are imported when they are called: some import vLLM."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

import click

# Name -> module:attribute, and a sentence for the list.
SUBCOMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("cli.serve:command", "Serve a model: the whole stack on this machine."),
    "join": ("cli.join:command", "Run one more executor of a local stack."),
    "chat": ("cli.chat:command", "Talk with a served model, at a reading pace."),
    "watch": ("cli.watch:command", "Show what an engine is doing."),
    "bench": ("cli.bench:command", "vLLM's serving benchmark, with readers."),
    "keys": ("cli.keys:command", "Add, list and revoke API keys."),
    "down": ("cli.serve:down", "Stop a stack that was left running."),
    "logs": ("cli.serve:logs", "Follow the local stack's logs."),
    "simulate": ("cli.simulator:simulate", "Compare policies in virtual time."),
    "size": ("cli.simulator:size", "Ask how many readers a GPU holds."),
}


class _Subcommands(click.Group):
    """Finds subcommands by name, and lists them without importing any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        module, _, attribute = SUBCOMMANDS[cmd_name][0].partition(":")
        found: click.Command = getattr(importlib.import_module(module), attribute)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, sentence) for name, (_, sentence) in SUBCOMMANDS.items()])


@click.command(cls=_Subcommands)
@click.version_option(package_name="evenflow", message="%(prog)s %(version)s")
def main() -> None:
    """An LLM server for readers: tokens at the pace they are read."""
    sys.path.append(str(Path.cwd()))  # for `--policy module:attribute`, as with `python -m`
