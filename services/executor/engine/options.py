"""vLLM's engine options as its own parser reads them, for those that no setting of ours names."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

# What the executor sets by itself; anything else there would break it.
OURS = frozenset(
    (
        "additional_config",
        "kv_transfer_config",
        "scheduler_cls",
        "structured_outputs_config",
        "worker_cls",
    )
)


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read_engine_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options that `arguments` give, by `AsyncEngineArgs`' names; no defaults.

    Raises ValueError naming what vLLM's parser does not take, or what is not the user's to set.
    """
    parser = AsyncEngineArgs.add_cli_args(_Parser(add_help=False, allow_abbrev=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    given: dict[str, Any] = vars(parser.parse_args(list(arguments)))
    if taken := sorted(OURS.intersection(given)):
        raise ValueError(f"{', '.join(taken)}: set by Evenflow itself")
    return given
