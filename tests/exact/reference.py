"""What stock vLLM answers to the workloads: computed once, then read from `.cache/reference`.

Its answers are a function of the model, vLLM, the workload and the processor. Each reference is
made in a process of its own (`python -m tests.exact.reference NAME [FILE]`), so that nothing of a
stock engine is left in the process of a test. Without FILE it goes where it belongs.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from demo.cached_build import build_once, recipe_fingerprint
from lab.engine import agents as sharers
from lab.engine import conversations as dialogues
from lab.engine import step_runner as harness
from lab.engine import workloads
from lab.engine.agents import agents
from lab.engine.conversations import conversations
from lab.engine.step_runner import Arrival, EngineCase, Outcome, StepRunner, stock
from lab.engine.workloads import long_prompt, mixed, sampled, stopping
from lab.latent_model import latent_fingerprint
from lab.models import exactness_fingerprint
from lab.stack.processes import ROOT
from tests.exact import latent_cases
from tests.exact.cases import make_case
from tests.exact.latent_cases import aborted, alone, latent_case
from tests.stock_recipe import run_apart, stock_recipe

FOLDER = ROOT / ".cache" / "reference"
FIELDS = ("tokens", "logprobs", "texts", "finish_reasons", "num_steps", "batches", "peak_blocks")

Run = Callable[[Sequence[Arrival]], Outcome]


def float32(run: Run) -> dict[str, Outcome]:
    plain = run(mixed())
    return {
        "mixed": plain,
        "long": run(long_prompt()),
        "sampled": run(sampled()),
        "stopping": run(stopping(plain.texts)),
        "conversations": turn_by_turn(run),
        "agents": run(agents()),
    }


def turn_by_turn(run: Run) -> Outcome:
    """Return the answers of all turns of `conversations`."""
    outcome = Outcome(tokens={}, logprobs={}, texts={})
    while new := [a for a in conversations(outcome.tokens) if a.request_id not in outcome.tokens]:
        turn = run(new)
        outcome.tokens |= turn.tokens
        outcome.texts |= turn.texts
    return outcome


def latent(run: Run) -> dict[str, Outcome]:
    return {"mixed": run(mixed()), "aborts": run(aborted()), "alone": run(alone())}


def bfloat16(run: Run) -> dict[str, Outcome]:
    return {"mixed": run(mixed())}


RECIPES: dict[str, tuple[EngineCase, Callable[[Run], dict[str, Outcome]]]] = {
    "float32": (make_case(), float32),
    "bfloat16": (make_case(dtype="bfloat16"), bfloat16),
    "latent-float32": (latent_case(), latent),
    "latent-tensor-parallel": (latent_case(num_ranks=2), latent),
    "latent-bfloat16": (latent_case("AMX_MLA"), latent),
}


@cache
def reference(name: str) -> dict[str, Outcome]:
    """Return stock vLLM's answers by the name of the workload; see `RECIPES`."""
    folder = build_once(FOLDER / name, _fingerprint(name), lambda empty: _make(name, empty))
    answers = json.loads((folder / "answers.json").read_text())
    return {workload: Outcome(**fields) for workload, fields in answers.items()}


def answers_to(workload: Sequence[Arrival], outcome: Outcome) -> Outcome:
    """Return the part of an outcome that belongs to the requests of `workload`."""
    names = [arrival.request_id for arrival in workload]
    return replace(
        outcome,
        tokens={name: outcome.tokens[name] for name in names},
        texts={name: outcome.texts[name] for name in names},
    )


def _fingerprint(name: str) -> str:
    case, _ = RECIPES[name]
    return recipe_fingerprint(
        latent_fingerprint() if name.startswith("latent") else exactness_fingerprint(),
        *stock_recipe(),
        repr(stock(case)),
        sys.modules[__name__],
        harness,
        workloads,
        dialogues,
        sharers,
        latent_cases,
    )


def _make(name: str, folder: Path) -> None:
    run_apart("tests.exact.reference", name, str(folder / "answers.json"))


def main() -> None:
    name, *files = sys.argv[1:]
    if not files:
        reference(name)
        return
    case, recipe = RECIPES[name]
    runner = StepRunner(stock(case))
    try:
        outcomes = recipe(runner.run)
    finally:
        runner.close()
    answers = {
        workload: {field: fields[field] for field in FIELDS}
        for workload, outcome in outcomes.items()
        for fields in [asdict(outcome)]
    }
    Path(*files).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
