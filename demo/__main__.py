"""`python -m demo`: the demo model, two stacks, the show; one stack is left running."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from cli.client.answer import AnswerError
from cli.client.engine_watch import WatchError
from cli.local.preflight import require
from cli.local.stack import Stack
from cli.serve import bring_up, ending_in_sentences
from demo import stacks
from demo.model import ModelError, demo_model, fastest_dtype
from demo.show import FULL, SHORT, Programme, Shown, print_table, show
from demo.snippets import snippets


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo")
    parser.add_argument("--short", action="store_true", help="fewer tokens, slower readers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was seen")
    options = parser.parse_args()
    with ending_in_sentences():
        try:
            shown = _run(SHORT if options.short else FULL)
        except (AnswerError, ModelError, WatchError) as error:
            sys.exit(f"error: {error}")
    if options.json:
        options.json.write_text(json.dumps(asdict(shown), indent=1))


def _run(programme: Programme) -> Shown:
    model, dtype = demo_model(), fastest_dtype()
    ours = stacks.evenflow(model, dtype)
    require(ours, dtype=dtype, is_cpu=True, num_engines=2)
    theirs = Stack(stacks.stock(ours))
    try:
        theirs.stop()  # what an interrupted show has left
        theirs.start()
        bring_up(ours)
        theirs.wait_ready(lambda status: None)  # else it would take its share of the show's time
        shown = show(programme, ours, theirs)
    finally:
        theirs.stop()
    print(f"\n{snippets(ours)}")
    print_table(shown)
    return shown


if __name__ == "__main__":
    main()
