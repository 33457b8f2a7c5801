"""A long answer that yields to a stream of short urgent ones; and what stock vLLM answers to it.

`python -m tests.exact.urgent_stream FILE` writes the tokens of stock vLLM, in a process of its own.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from lab.engine.step_runner import Arrival, StepRunner, make_prompt, stock
from tests.exact.cases import make_case

LOW = Arrival(request_id="low", prompt=make_prompt(60, 1), num_output_tokens=500)
NUM_URGENT = 8  # different ones, again and again


def urgent(number: int, *, step: int = 0) -> Arrival:
    """Return one of the stream: its prompt and length are those of `number % NUM_URGENT`."""
    kind = number % NUM_URGENT
    return Arrival(
        request_id=f"u{number}",
        prompt=make_prompt(90 + 37 * kind, 100 + kind),
        num_output_tokens=20 + 5 * kind,
        step=step,
    )


def of_stock(tokens: Mapping[str, list[int]], request_id: str) -> list[int]:
    """Return what stock vLLM answers to a request of the stream."""
    return tokens[request_id if request_id == "low" else f"u{int(request_id[1:]) % NUM_URGENT}"]


def main() -> None:
    runner = StepRunner(stock(make_case()))
    try:
        outcome = runner.run([LOW, *map(urgent, range(NUM_URGENT))])
    finally:
        runner.close()
    Path(sys.argv[1]).write_text(json.dumps(outcome.tokens))


if __name__ == "__main__":
    main()
