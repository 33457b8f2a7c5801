"""Stock vLLM's answers to what the executors are asked: made once, then read from `.cache`.

One process answers everything (`python -m tests.executor_stock FILE`); without FILE the answers go
where they belong.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from demo.cached_build import build_once, recipe_fingerprint
from lab.models import exactness_fingerprint, exactness_model
from lab.stack.executor_process import ENGINE_SETTINGS
from lab.stack.processes import ROOT
from tests import stock_requests
from tests.stock_recipe import run_apart, stock_recipe
from tests.stock_requests import WORKLOADS

FOLDER = ROOT / ".cache" / "reference" / "executors"

StockAnswers = dict[str, dict[str, Any]]


@cache
def stock_answers(workload: str) -> StockAnswers:
    """Return the answers to one of `WORKLOADS` by the names of its requests.

    Each has `ids`, `text`, `finish_reason`, `num_prompt_tokens`, and what `places_of` says.
    """
    fingerprint = recipe_fingerprint(
        exactness_fingerprint(),
        *stock_recipe(),
        repr(ENGINE_SETTINGS),
        sys.modules[__name__],
        stock_requests,
    )
    folder = build_once(FOLDER, fingerprint, _make)
    answers: dict[str, StockAnswers] = json.loads((folder / "answers.json").read_text())
    return answers[workload]


def _make(folder: Path) -> None:
    run_apart("tests.executor_stock", str(folder / "answers.json"))


def places_of(places: Any) -> list[dict[int, tuple[float, str]] | None] | None:
    """Return probability and text by token id for each place; None where there is nothing."""
    if places is None:
        return None
    return [
        place and {id: (entry.logprob, entry.decoded_token) for id, entry in place.items()}
        for place in places
    ]


def _answer(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    llm.reset_prefix_cache()  # no request may find what another one has left
    sampling = SamplingParams.from_optional(**request["sampling"])
    if "messages" in request:
        (output,) = llm.chat(request["messages"], sampling, use_tqdm=False)
    else:
        (output,) = llm.generate([request["prompt"]], sampling, use_tqdm=False)
    first = output.outputs[0]
    return {
        "ids": list(first.token_ids),
        "text": first.text,
        "finish_reason": first.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids or ()),
        "logprobs": places_of(first.logprobs),
        "prompt_logprobs": places_of(output.prompt_logprobs),
    }


def main() -> None:
    if not sys.argv[1:]:
        stock_answers("stream")
        return
    from vllm import LLM

    llm = LLM(
        model=str(exactness_model()),
        **{name.lower(): value for name, value in ENGINE_SETTINGS.items()},
    )
    answers = {
        workload: {name: _answer(llm, request) for name, request in requests.items()}
        for workload, requests in WORKLOADS.items()
    }
    Path(sys.argv[1]).write_text(json.dumps(answers))


def near(expected: dict[str, list[Any]]) -> dict[str, Any]:
    """Return a place of a stock answer as `places` has it, for comparison."""
    return {id: (pytest.approx(p, abs=1e-5), text) for id, (p, text) in expected.items()}


if __name__ == "__main__":
    main()
