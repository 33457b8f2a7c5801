"""`python -m bench.dtype [--out DIR]`: in which data type this processor computes the demo model.

One vLLM engine for each data type, one after the other, one thread, no layer-wise KV.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from bench.document import Benchmark, Row, measure_named
from demo.model import demo_model, fastest_dtype
from lab.stack.processes import ENGINE_ENVIRONMENT, ROOT

DTYPES = ("float32", "bfloat16")
BATCHES = (1, 4)
PROMPT_TOKENS = 1_500
NUM_STEPS = 48  # decode steps of a run
NUM_RUNS = 5
TIMEOUT_S = 900


def measure() -> list[Row]:
    """Return one row per data type: medians over runs."""
    rows: list[Row] = []
    for dtype in DTYPES:
        done = subprocess.run(
            [sys.executable, "-m", "bench.dtype", "--one", dtype],
            cwd=ROOT,
            env=os.environ | ENGINE_ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        # The engine prints there too.
        rows.append(json.loads(next(s for s in done.stdout.splitlines() if s.startswith("{"))))
    return rows


def _measure_one(dtype: str) -> Row:
    from vllm import LLM

    llm = LLM(
        model=str(demo_model()),
        dtype=dtype,
        max_model_len=2_048,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 29,
    )
    _ask(llm, batch=1, num_prompt_tokens=16, num_tokens=4)  # the first steps compile
    row: Row = {"dtype": dtype, "chosen": dtype == fastest_dtype(), "capability": _capability()}
    for batch in BATCHES:
        row[f"decode_{batch}_s"] = statistics.median(
            _decode_step_s(llm, batch) for _ in range(NUM_RUNS)
        )
    row["prompt_s"] = statistics.median(
        _ask(llm, batch=1, num_prompt_tokens=PROMPT_TOKENS, num_tokens=1) for _ in range(NUM_RUNS)
    )
    return row


def _decode_step_s(llm: Any, batch: int) -> float:
    short = _ask(llm, batch=batch, num_prompt_tokens=16, num_tokens=1)
    long = _ask(llm, batch=batch, num_prompt_tokens=16, num_tokens=1 + NUM_STEPS)
    return (long - short) / NUM_STEPS


def _ask(llm: Any, *, batch: int, num_prompt_tokens: int, num_tokens: int) -> float:
    """Return the seconds that a batch of greedy answers takes."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [1_000 + 7 * place + row for place in range(num_prompt_tokens)]}
        for row in range(batch)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    started_s = time.monotonic()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.monotonic() - started_s


def _capability() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _table(rows: Any) -> list[list[str]]:
    header = ["data type", "instructions", "decode, batch 1", "decode, batch 4", "prompt", "chosen"]
    return [
        header,
        *(
            [
                row["dtype"],
                row["capability"],
                f"{row['decode_1_s'] * 1e3:.0f} ms",
                f"{row['decode_4_s'] * 1e3:.0f} ms",
                f"{row['prompt_s']:.1f} s",
                "yes" if row["chosen"] else "",
            ]
            for row in rows
        ),
    ]


BENCHMARK = Benchmark(
    name="dtype",
    title="The demo model's data type on this processor",
    definitions={
        "decode": f"a decode step behind some {16 + NUM_STEPS // 2} tokens of context, medians of "
        f"{NUM_RUNS} runs of {NUM_STEPS} steps",
        "prompt": f"a prompt of {PROMPT_TOKENS} tokens and one token of answer",
        "instructions": "what PyTorch says that it uses",
        "chosen": "what the demo takes on a processor like this one",
    },
    measure=measure,
    table=_table,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(_measure_one(sys.argv[2])))
    else:
        measure_named({"dtype": lambda: BENCHMARK}, prefix="demo", description=__doc__)
