"""`evenflow serve` and `evenflow down`: the local stack in the foreground, or left running."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import click
from rich.console import Console
from rich.status import Status

from cli.local.preflight import PreflightError, require
from cli.local.settings import BadSettingError, StackSettings, read_settings, running_settings
from cli.local.stack import Stack, StackError

INTERRUPTED_EXIT_CODE = 130
USER_ERRORS = (StackError, PreflightError, BadSettingError)


@click.command("serve", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Serve a model: every process of the stack, until Ctrl-C."""
    with ending_in_sentences():
        _serve(arguments)


@click.command("down")
def down() -> None:
    """Stop the local stack."""
    with ending_in_sentences():
        print("stopped" if Stack(running_settings()).stop() else "nothing was running")


@click.command("logs")
def logs() -> None:
    """Follow every log of the local stack, until Ctrl-C."""
    with ending_in_sentences():
        files = sorted(str(path) for path in running_settings().log_dir.glob("*.log"))
        if not files:
            raise StackError("there are no logs yet: `evenflow serve MODEL` starts a stack")
        subprocess.run(["tail", "-n", "20", "-F", *files], check=False)


def bring_up(settings: StackSettings) -> Stack:
    """Start the stack and wait until it answers; a line says what it waits for.

    Nothing of it stays if it does not get there. Raises StackError.
    """
    stack, started_s = Stack(settings), time.monotonic()

    def elapsed() -> str:
        return f"{time.monotonic() - started_s:5.1f} s"

    print(f"waiting for {settings.model_id}", flush=True)
    try:
        stack.start()
        with _progress(elapsed) as report:
            stack.wait_ready(report)
    except BaseException:
        stack.stop()
        raise
    print(f"{elapsed()}  ready: {settings.base_url}", flush=True)
    return stack


@contextmanager
def ending_in_sentences() -> Iterator[None]:
    """End the process with a sentence where the user can do something about it."""
    try:
        yield
    except USER_ERRORS as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)


def _serve(arguments: Sequence[str]) -> None:
    from cli.options import read_options, runs_on_cpu

    options = read_options(arguments, os.environ)
    settings = read_settings().having(
        options.variables, ports=options.ports, redis_url=options.redis_url
    )
    if not options.detach and Stack(settings).processes():
        raise StackError(
            f"a stack already runs from {settings.run_dir}: `evenflow down` stops it, "
            "EVENFLOW_RUN_DIR keeps two apart"
        )
    require(settings, dtype=options.dtype, is_cpu=runs_on_cpu())
    with _ended_by_signals():
        stack = bring_up(settings)
        print(f"\n{_addresses(settings)}\n", flush=True)
        if not options.detach:
            _stay(stack)


def _stay(stack: Stack) -> None:
    """Watch over the stack until Ctrl-C, then stop it. Raises StackError when it fails."""
    print("Ctrl-C stops it", flush=True)
    try:
        stack.watch_over(lambda line: print(line, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print("\nstopping: live requests may end (Ctrl-C again: at once)", flush=True)
    finally:
        stack.stop()
    print("stopped", flush=True)


def _addresses(settings: StackSettings) -> str:
    return (
        f"OpenAI API   {settings.base_url}/v1      gRPC   {settings.address('gateway')}\n"
        f"model        {settings.model_id}\n"
        f"metrics      {settings.base_url}/metrics      logs   {settings.log_dir}"
    )


@contextmanager
def _progress(elapsed: Callable[[], str]) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a status: one line that changes on a terminal, lines elsewhere."""
    console = Console()
    if not console.is_terminal:
        yield lambda status: print(f"{elapsed()}  {status}", flush=True)
        return
    with Status("", console=console) as line:
        yield lambda status: line.update(f"{elapsed()}  {status}")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Treat SIGTERM, and a terminal that closes, like Ctrl-C."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {
        signum: signal.signal(signum, interrupt) for signum in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
