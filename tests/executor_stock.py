"""Stock vLLM's answers, from a process of its own: `answers_of_stock_vllm`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.executor_process import ENGINE_SETTINGS
from tests.models import exactness_model
from tests.processes import ENGINE_ENVIRONMENT, ROOT

TIMEOUT_S = 300.0


def answers_of_stock_vllm(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `ids`, `text` and `finish_reason` for each request, and what `places_of` says.

    A request has `prompt` (text) or `messages`, and `sampling` with vLLM's own names.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as answers:
        subprocess.run(
            [sys.executable, "-m", "tests.executor_stock", answers.name],
            cwd=ROOT,
            env=os.environ | ENGINE_ENVIRONMENT,
            input=json.dumps(requests),
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        result: list[dict[str, Any]] = json.load(answers)
    return result


def places_of(places: Any) -> list[dict[int, tuple[float, str]] | None] | None:
    """Return probability and text by token id for each place; None where there is nothing."""
    if places is None:
        return None
    return [
        place and {id: (entry.logprob, entry.decoded_token) for id, entry in place.items()}
        for place in places
    ]


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(exactness_model()),
        **{name.lower(): value for name, value in ENGINE_SETTINGS.items()},
    )
    answers = []
    for request in json.load(sys.stdin):
        sampling = SamplingParams.from_optional(**request["sampling"])  # ids from JSON's strings
        if "messages" in request:
            (output,) = llm.chat(request["messages"], sampling, use_tqdm=False)
        else:
            (output,) = llm.generate([request["prompt"]], sampling, use_tqdm=False)
        first = output.outputs[0]
        answers.append(
            {
                "ids": list(first.token_ids),
                "text": first.text,
                "finish_reason": first.finish_reason,
                "num_prompt_tokens": len(output.prompt_token_ids or ()),
                "logprobs": places_of(first.logprobs),
                "prompt_logprobs": places_of(output.prompt_logprobs),
            }
        )
    Path(sys.argv[1]).write_text(json.dumps(answers))


def near(expected: dict[str, list[Any]]) -> dict[str, Any]:
    """Return a place of a stock answer as `places` has it, for comparison."""
    return {id: (pytest.approx(p, abs=1e-5), text) for id, (p, text) in expected.items()}


if __name__ == "__main__":
    main()
