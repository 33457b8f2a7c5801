"""`evenflow join`: one more executor for a stack that runs on this machine."""

import os
import sys

import click

from cli.local.preflight import require
from cli.local.settings import ROOT
from cli.local.stacks import NoStackError, one_more_executor, only_stack
from cli.serve import NAMED, ending_in_sentences


@click.command("join")
@NAMED
def command(name: str | None) -> None:
    """Run one more executor of a local stack, with the same settings, until Ctrl-C.

    The stack's gateway finds it. Requests go to both, and those of one that is lost go on at the
    other. On GPUs CUDA_VISIBLE_DEVICES says which it has.
    """
    with ending_in_sentences():
        stack = only_stack(name)
        if stack is None:
            raise NoStackError("no stack runs here: `evenflow serve MODEL` starts one")
        from cli.options import runs_on_cpu  # imports vLLM

        settings = one_more_executor(stack)
        dtype = settings.variables.get("EVENFLOW_EXECUTOR_DTYPE", "auto")
        require(settings, dtype=dtype, is_cpu=runs_on_cpu())
        print(
            f"executor {settings.variables['EVENFLOW_EXECUTOR_ID']} of the stack {stack.name}, "
            f"process {os.getpid()}, at {settings.address('executor')}; Ctrl-C ends it",
            flush=True,
        )
        os.chdir(ROOT)
        os.execve(
            sys.executable, (sys.executable, "-m", "services.executor"), settings.environment()
        )
