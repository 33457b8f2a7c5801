"""`evenflow serve` and `evenflow down`: the local stack in the foreground, or left running."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

import click
from rich.console import Console
from rich.status import Status

from cli.client.expectation import expectation, read_model_info
from cli.local.preflight import PreflightError, require
from cli.local.settings import BadSettingError, StackSettings, read_settings, state_dir
from cli.local.stack import Stack, StackError
from cli.local.stacks import NoStackError, claimed, only_stack, placed

INTERRUPTED_EXIT_CODE = 130
BROKEN_PIPE_EXIT_CODE = 141  # as a shell tells it of what SIGPIPE ends
USER_ERRORS = (StackError, PreflightError, BadSettingError, NoStackError)
NAMED = click.option("--name", help="Of the stack; needed where several run.")


@click.command("serve", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Serve a model: every process of the stack, until Ctrl-C."""
    with ending_in_sentences():
        _serve(arguments)


@click.command("down")
@NAMED
def down(name: str | None) -> None:
    """Stop a local stack."""
    with ending_in_sentences():
        settings = only_stack(name)
        print("stopped" if settings and Stack(settings).stop() else "nothing was running")


@click.command("logs")
@NAMED
def logs(name: str | None) -> None:
    """Follow every log of a local stack, until Ctrl-C."""
    with ending_in_sentences():
        settings = only_stack(name)
        if settings is None:
            raise StackError(
                f"no stack runs here: `evenflow serve MODEL` starts one. Logs of those that ended "
                f"are in {state_dir()}"
            )
        files = sorted(str(path) for path in settings.log_dir.glob("*.log"))
        subprocess.run(["tail", "-n", "20", "-F", *files], check=False)


def bring_up(
    settings: StackSettings, *, check: Callable[[StackSettings], None] = lambda settings: None
) -> Stack:
    """Start the stack and wait until it answers; a line says what it waits for.

    `check` may refuse its settings, name and ports included. Nothing of it stays if it does not
    get there. Raises StackError and PreflightError.
    """
    started_s = time.monotonic()

    def elapsed() -> str:
        return f"{time.monotonic() - started_s:5.1f} s"

    with ExitStack() as cleanup:
        with claimed(settings.state_dir):
            stack = Stack(placed(settings))
            check(stack.settings)
            print(f"waiting for {settings.model_id}", flush=True)
            cleanup.callback(stack.stop)
            stack.start()
        with _progress(elapsed) as report:
            stack.wait_ready(report)
        cleanup.pop_all()
    print(f"{elapsed()}  ready: {stack.settings.base_url}", flush=True)
    return stack


@contextmanager
def ending_in_sentences() -> Iterator[None]:
    """End the process with a sentence where the user can do something about it."""
    try:
        yield
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
    except BrokenPipeError:  # as in `evenflow watch | head`
        # What is still in the buffer has no reader either: Python flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE_EXIT_CODE)


def _serve(arguments: Sequence[str]) -> None:
    from cli.options import read_options, runs_on_cpu

    options = read_options(arguments, os.environ)
    settings = read_settings().having(
        options.variables, ports=options.ports, redis_url=options.redis_url, name=options.name
    )

    def check(settings: StackSettings) -> None:
        if not options.detach and Stack(settings).processes():
            raise StackError(
                f"the stack {settings.name} already runs at {settings.base_url}: `evenflow down "
                f"--name {settings.name}` stops it, --port and --name start another beside it"
            )
        require(settings, dtype=options.dtype, is_cpu=runs_on_cpu())

    with _ended_by_signals():
        stack = bring_up(settings, check=check)
        print(f"\n{_addresses(stack.settings)}\n", flush=True)
        if info := read_model_info(stack.settings.address("executor")):
            print("\n".join(expectation(info)) + "\n", flush=True)
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
        f"model        {settings.model_id}      stack   {settings.name}\n"
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
