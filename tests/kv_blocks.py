"""Exchange KV blocks inside a running in-process vLLM engine, to see who notices.

Wants an engine of one worker in this process: VLLM_ENABLE_V1_MULTIPROCESSING=0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.engine.llm_engine import LLMEngine

TokenIds = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRef:
    """One KV block of a running request, by its place in the request."""

    request_id: str
    layer: int  # 0 is the first layer of the model
    index: int  # the block of tokens [index * block_size, (index + 1) * block_size)


def swap_blocks(engine: LLMEngine, first: BlockRef, second: BlockRef) -> None:
    """Exchange what two blocks of one layer hold, between two engine steps.

    Exchanging two blocks of *one* request would change nothing: attention does not depend on the
    order in which it visits keys, and keys carry their positions. So the requests must differ.
    """
    if first.layer != second.layer or first.request_id == second.request_id:
        raise ValueError("swap blocks of one layer and two requests")
    a, b = _block(engine, first), _block(engine, second)
    held = a.clone()
    a.copy_(b)
    b.copy_(held)


def greedy_tokens(
    engine: LLMEngine,
    prompts: Mapping[str, TokenIds],
    *,
    num_tokens: int,
    after_first_token: Callable[[LLMEngine], None] | None = None,
) -> dict[str, list[int]]:
    """Complete all prompts in one batch; return each request's first `num_tokens` tokens.

    `after_first_token` runs once, when every request has its first token and none has ended.
    """
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for request_id, token_ids in prompts.items():
        engine.add_request(request_id, {"prompt_token_ids": list(token_ids)}, sampling)
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if after_first_token is not None and len(tokens) == len(prompts):
            after_first_token(engine)
            after_first_token = None
    return tokens


def _block(engine: LLMEngine, ref: BlockRef) -> Any:
    """Return a writable view of one block: `[num_kv_heads, block_size, 2 * head_dim]` on CPU."""
    core = engine.engine_core.engine_core
    blocks_of_groups = core.scheduler.kv_cache_manager.get_block_ids(_internal_id(engine, ref))
    group = next(
        number
        for number, spec in enumerate(core.scheduler.kv_cache_config.kv_cache_groups)
        if any(extract_layer_index(name) == ref.layer for name in spec.layer_names)
    )
    layers = core.model_executor.driver_worker.worker.model_runner.kv_caches
    return layers[ref.layer][blocks_of_groups[group][ref.index]]


def _internal_id(engine: LLMEngine, ref: BlockRef) -> str:
    """Return the scheduler's name of a request: vLLM adds a random suffix to the caller's."""
    states = engine.output_processor.request_states
    return next(name for name, s in states.items() if s.external_req_id == ref.request_id)
