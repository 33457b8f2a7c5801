"""The simulator's `vllm` beside stock vLLM's engine with a model: hits, preemptions, last steps.

`tests/integration/test_simulated_vllm.py` holds drawn traces against vLLM's scheduler alone.
"""

from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from lab.engine.step_runner import VOCABULARY, Arrival, EngineCase, StepRunner
from simulator.workload import ArrivingRequest
from tests.vllm_traces import (
    BLOCK_SIZE,
    MAX_TOKENS,
    TRACE,
    Engine,
    Seen,
    drive,
    simulated,
    token_of,
)

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
    pytest.mark.nightly,
]


class StockEngine:
    """Stock vLLM, a step at a time. A conversation's next prompt begins with what was answered."""

    def __init__(self, runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self._runner = runner
        self._said: dict[str, list[int]] = defaultdict(list)
        self.live: dict[str, ArrivingRequest] = {}
        self._num_preemptions: Counter[str] = Counter()
        self.seen: dict[str, Seen] = {}
        preempt = runner.scheduler._preempt_request

        def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._num_preemptions[request.request_id] += 1
            return preempt(request, *args, **kwargs)

        monkeypatch.setattr(runner.scheduler, "_preempt_request", counted)

    def add(self, request: ArrivingRequest) -> None:
        prompt = list(self._said[request.conversation]) if request.conversation else []
        for position in range(len(prompt), request.num_prompt_tokens):
            prompt.append(VOCABULARY[token_of(request, position) % len(VOCABULARY)])
        self._said[request.conversation] = prompt
        self.live[request.request_id] = request
        self._runner.add(
            Arrival(
                request_id=request.request_id,
                prompt=prompt,
                num_output_tokens=request.num_output_tokens,
            )
        )

    def step(self, end_s: float) -> None:
        for output in self._runner.engine.step():
            if output.finished:
                request = self.live.pop(output.request_id)
                self._said[request.conversation] += output.outputs[0].token_ids
                self.seen[output.request_id] = Seen(
                    num_cached_tokens=output.num_cached_tokens,
                    num_preemptions=self._num_preemptions[output.request_id],
                    ended_s=end_s,
                )


def test_hits_preemptions_and_last_steps_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(num_blocks=60)
    case = EngineCase(
        num_blocks=engine.num_blocks + 1,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_TOKENS,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        prefix_caching=True,
    )
    runner = StepRunner(case)
    try:
        found = drive(StockEngine(runner, monkeypatch), TRACE)
    finally:
        monkeypatch.undo()
        runner.close()

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        assert found == apart.submit(simulated, engine, TRACE).result()
