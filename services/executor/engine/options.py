"""vLLM's engine options as its own parser reads them, for those that no setting of ours names."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from services.executor.types import UnsupportedError

# What the executor sets by itself; anything else there would break it.
OURS = frozenset(
    (
        "additional_config",
        "kv_transfer_config",
        "scheduler_cls",
        "worker_cls",
    )
)
# Left to itself vLLM checks a form with the first library that takes it, and compiles it with the
# one that the engine's first form was for.
GRAMMAR_BACKEND = "xgrammar"


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UnsupportedError(message)


def read_engine_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options that `arguments` give, by `AsyncEngineArgs`' names; no defaults.

    Raises UnsupportedError naming what vLLM's parser does not take, or what Evenflow sets itself.
    """
    parser = AsyncEngineArgs.add_cli_args(_Parser(add_help=False, allow_abbrev=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    given: dict[str, Any] = vars(parser.parse_args(list(arguments)))
    if taken := sorted(OURS.intersection(given)):
        raise UnsupportedError(f"{', '.join(taken)}: set by Evenflow itself")
    check_grammar_backend(given)
    return given


def check_grammar_backend(given: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if the given options ask for another library for forms than ours."""
    forms = given.get("structured_outputs_config")
    if forms is not None and forms.backend not in ("auto", GRAMMAR_BACKEND):
        raise UnsupportedError(f"structured_outputs_config: the backend must be {GRAMMAR_BACKEND}")
