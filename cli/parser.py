"""vLLM's own command-line parser, for commands that take vLLM's options beside ours."""

import difflib
import re
import sys
from collections.abc import Iterable
from typing import NoReturn

from vllm.utils.argparse_utils import FlexibleArgumentParser

UNKNOWN = "unrecognized arguments: "
USAGE_ERROR = 2  # argparse's exit status


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` was probably meant to be; None if nothing comes close.

    Part of a name stands for it: --num-prompt and --prompts for --num-prompts.
    """
    names = sorted(known)
    alike = difflib.get_close_matches(name, names, n=1)
    if alike:
        return alike[0]
    bare = name.strip("-")
    return min((n for n in names if bare and bare in n), key=len, default=None)


class NearestNameParser(FlexibleArgumentParser):  # type: ignore[misc]
    """Refuses what it does not know in one sentence, with the name that was probably meant."""

    def error(self, message: str) -> NoReturn:
        """End the process; only unknown options get a sentence of their own."""
        if message.startswith(UNKNOWN):
            left_over = message.removeprefix(UNKNOWN).split()
            options = [argument for argument in left_over if argument.startswith("-")]
            message = (
                "\n".join(map(self._unknown, options))
                or f"{' '.join(left_over)}: belongs to no option"
            )
        print(f"{message}\n`{self.prog} --help` says what there is.", file=sys.stderr)
        sys.exit(USAGE_ERROR)

    def _unknown(self, argument: str) -> str:
        name = re.split(r"[=.]", argument, maxsplit=1)[0]
        meant = nearest(name, self._option_string_actions)
        return f"there is no option {name}" + (f"; did you mean {meant}?" if meant else "")
