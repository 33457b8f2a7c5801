"""Models whose layers keep less than all KV, beside full attention: their engines and answers.

What stock vLLM answers is kept as `reference.py` keeps it; `python -m tests.exact.kinds NAME FILE`
makes it.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

from vllm.distributed.parallel_state import destroy_model_parallel

from demo.cached_build import build_once, recipe_fingerprint
from lab.engine import step_runner as harness
from lab.engine import workloads
from lab.engine.step_runner import Arrival, EngineCase, Model, Outcome, StepRunner, stock
from lab.engine.workloads import long_prompt, mixed
from lab.kind_models import CONFIGS, kind_fingerprint, kind_model
from tests.exact.cases import SLOW_LINK
from tests.exact.reference import FIELDS, FOLDER, turn_by_turn
from tests.stock_recipe import run_apart, stock_recipe

# Layers that may leave: the others are in no layer group of the block owner's.
MODELS = {
    name: Model(directory=partial(kind_model, name), num_layers=2 if few else 4)
    for name, few in {
        "gpt_oss": False,
        "granite4": False,
        "llama4": True,
        "gemma3": True,
        "gemma4": True,
        "qwen3_next": True,
    }.items()
}
assert MODELS.keys() == CONFIGS.keys()
WORKLOADS: Mapping[str, Sequence[Arrival]] = {"mixed": mixed(8), "long": long_prompt(8)}
IN_BF16 = {"qwen3_next": "bfloat16"}  # whose kernels take nothing else


def kind_case(name: str, *, layers_per_group: int = 1, **engine: object) -> EngineCase:
    """Return an engine whose tests choose the blocks of its pool."""
    return EngineCase(
        **{
            "num_blocks": 1,
            "model": MODELS[name],
            "kv": replace(SLOW_LINK, layers_per_group=layers_per_group),
            "dtype": IN_BF16.get(name, "float32"),
            "max_num_batched_tokens": 97,
            **engine,
        }
    )


# Pools that hold the longest prompt, and no more than a part of what runs beside it.
EVERY_COMMIT = {
    "gpt_oss": kind_case("gpt_oss", num_blocks=110),
    "gpt_oss-asynchronous": kind_case("gpt_oss", num_blocks=110, asynchronous=True),
    "granite4": kind_case("granite4", num_blocks=50),
    "granite4-asynchronous": kind_case("granite4", num_blocks=50, asynchronous=True),
}
NIGHTLY = {
    "gpt_oss-pairs": kind_case("gpt_oss", num_blocks=52, layers_per_group=2),
    "gpt_oss-in-large-chunks": kind_case("gpt_oss", num_blocks=100, max_num_batched_tokens=256),
    "gpt_oss-tensor-parallel": kind_case("gpt_oss", num_blocks=110, tensor_parallel_size=2),
    "granite4-pairs": kind_case("granite4", num_blocks=26, layers_per_group=2),
    "granite4-tensor-parallel": kind_case("granite4", num_blocks=50, tensor_parallel_size=2),
    "llama4": kind_case("llama4", num_blocks=88),
    "llama4-asynchronous": kind_case("llama4", num_blocks=112, asynchronous=True),
    "gemma3": kind_case("gemma3", num_blocks=112),
    "gemma4": kind_case("gemma4", num_blocks=84),
    "gemma4-asynchronous": kind_case(
        "gemma4", num_blocks=84, asynchronous=True, max_num_batched_tokens=33
    ),
    "gemma3-asynchronous": kind_case("gemma3", num_blocks=145, asynchronous=True),
}
CASES = {**EVERY_COMMIT, **NIGHTLY}


def start(case: EngineCase) -> StepRunner:
    """Start an engine, without the groups of ranks of one before it in this process.

    vLLM keeps them, and makes a group for experts only together with the others.
    """
    destroy_model_parallel()
    return StepRunner(case)


@cache
def kind_reference(name: str) -> dict[str, Outcome]:
    """Return stock vLLM's answers of a model, by the name of the workload."""
    folder = build_once(FOLDER / name, _fingerprint(name), partial(_make, name))
    answers = json.loads((folder / "answers.json").read_text())
    return {workload: Outcome(**fields) for workload, fields in answers.items()}


def _fingerprint(name: str) -> str:
    return recipe_fingerprint(
        kind_fingerprint(name),
        *stock_recipe(),
        repr(stock(kind_case(name))),
        sys.modules[__name__],
        harness,
        workloads,
    )


def _make(name: str, folder: Path) -> None:
    kind_model(name)
    run_apart("tests.exact.kinds", name, str(folder / "answers.json"))


def main() -> None:
    name, file = sys.argv[1:]
    runner = StepRunner(stock(kind_case(name)))
    try:
        outcomes = {workload: runner.run(asked) for workload, asked in WORKLOADS.items()}
        outcomes["conversations"] = turn_by_turn(runner.run)
    finally:
        runner.close()
    answers = {
        workload: {field: asdict(outcome)[field] for field in FIELDS}
        for workload, outcome in outcomes.items()
    }
    Path(file).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
