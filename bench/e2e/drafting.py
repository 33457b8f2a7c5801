"""Speculative decoding of a run: n-gram, or a drafter that knows the answers of its trace."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.e2e.records import RunKey
from bench.e2e.replay import RunError, replay
from bench.e2e.systems import Device
from bench.e2e.trace import NUM_WARM_UP_REQUESTS, TracedRequest, warm_up
from lab.known_drafts import KNOWN_ANSWERS, known_drafts, save_answers
from lab.stack.executor_process import ExecutorProcess

NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def with_drafts(system: Mapping[str, object], key: RunKey) -> dict[str, object]:
    """Return the executor's settings of a system, with what drafts in a run."""
    if not key.num_drafts:
        return dict(system)
    config = {**NGRAM, "num_speculative_tokens": key.num_drafts}
    if key.acceptance is not None:
        config = known_drafts(num_drafts=key.num_drafts)
    arguments = json.loads(str(system.get("ENGINE_ARGS", "[]")))
    arguments += ["--speculative-config", json.dumps(config)]
    return {**system, "ENGINE_ARGS": json.dumps(arguments)}


def environment_of(
    key: RunKey, trace: Sequence[TracedRequest], device: Device, folder: Path
) -> dict[str, str]:
    """Return where the drafter of a run finds the answers, which are generated first.

    Empty where the run's drafter knows none.
    """
    if not key.num_drafts or key.acceptance is None:
        return {}
    path = folder / f"answers-s{key.seed}.json"
    if not path.exists():
        alone = [*warm_up(NUM_WARM_UP_REQUESTS), *trace]
        save_answers(path, asyncio.run(_answers(alone, device, folder)))
    return {KNOWN_ANSWERS: json.dumps({"path": str(path), "right_frac": key.acceptance})}


async def _answers(
    trace: Sequence[TracedRequest], device: Device, folder: Path
) -> list[tuple[list[int], Sequence[int]]]:
    """Return each prompt and its answer, by an engine of stock vLLM that waits for no device."""
    given = device.settings()
    settings = {name: given[name] for name in ("BLOCK_SIZE", "MAX_MODEL_LEN")}
    process = ExecutorProcess(folder / "answers.log", **settings)
    with process.serving():
        at_once = [request.at_once for request in trace]
        records = (await replay(process.address, at_once)).requests
    if failed := [record.failure for record in records if record.failure]:
        raise RunError(f"{len(failed)} requests without an answer: {failed[0]}")
    pairs = zip(trace, records, strict=True)
    return [(request.prompt(), record.token_ids) for request, record in pairs]
