"""vLLM's own scheduler on a trace, with a model that knows what comes next."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lab.models import exactness_model
from services.executor.engine.config import make_config
from services.executor.settings import ExecutorSettings
from simulator.workload import ArrivingRequest
from tests.vllm_traces import BLOCK_SIZE, Engine, Seen, token_of

NUM_DRAFTS = 3
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)


class Config:
    """vLLM's configuration, which cannot be printed."""

    def __init__(self, config: Any) -> None:
        self.vllm = config


def configured(*arguments: str) -> Config:
    settings = ExecutorSettings(
        model=str(exactness_model()),
        max_model_len=2_048,
        block_size=BLOCK_SIZE,
        engine_args=list(arguments),
    )
    return Config(make_config(settings))


class TracedVllm:
    """vLLM's scheduler, and a model that knows what comes next, as a drafter does at times."""

    def __init__(self, engine: Engine, config: Any) -> None:
        self._drafts = engine.drafts
        given = config.scheduler_config
        given.watermark = engine.vllm.watermark
        given.scheduler_reserve_full_isl = engine.vllm.scheduler_reserve_full_isl
        given.max_num_seqs = engine.max_num_seqs
        given.max_num_batched_tokens = engine.max_num_batched_tokens
        config.cache_config.num_gpu_blocks = engine.num_blocks + 1  # vLLM keeps one for itself
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=engine.num_blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.live: dict[str, tuple[ArrivingRequest, Request]] = {}
        self.num_cached: dict[str, int] = {}
        self.seen: dict[str, Seen] = {}

    def add(self, request: ArrivingRequest) -> None:
        made = Request(
            request_id=request.request_id,
            prompt_token_ids=[token_of(request, i) for i in range(request.num_prompt_tokens)],
            sampling_params=SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.live[request.request_id] = request, made
        self.scheduler.add_request(made)

    def step(self, end_s: float) -> None:
        self.end(self.scheduler.schedule(), end_s)

    def end(self, output: SchedulerOutput, end_s: float) -> None:
        """Take in what a step has come to."""
        ids = list(output.num_scheduled_tokens)
        for new in output.scheduled_new_reqs:
            self.num_cached.setdefault(new.req_id, new.num_computed_tokens)
        sampled = []
        for request_id in ids:
            given, live = self.live[request_id]
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            complete = live.num_computed_tokens == live.num_tokens + len(drafts)
            sampled.append(self._accepted(given, live.num_tokens, drafts) if complete else [])
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
                kv_connector_output=self.copied(output),
            ),
        )
        self._draft([one for one, new in zip(ids, sampled, strict=True) if new])
        for request_id, (_, live) in list(self.live.items()):
            if live.is_finished():
                del self.live[request_id]
                self.seen[request_id] = Seen(
                    num_cached_tokens=self.num_cached[request_id],
                    num_preemptions=live.num_preemptions,
                    ended_s=end_s,
                )

    def copied(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """Return what a connector's copies have come to; None: there is no connector."""
        return None

    def _accepted(self, given: ArrivingRequest, start: int, drafts: Sequence[int]) -> list[int]:
        """Return the tokens from a position on: the right drafts, and one more."""
        right = [token_of(given, start + place) for place in range(len(drafts) + 1)]
        pairs = enumerate(zip(drafts, right, strict=False))
        num_right = next((n for n, (draft, token) in pairs if draft != token), len(drafts))
        return right[: num_right + 1]

    def _draft(self, request_ids: Sequence[str]) -> None:
        """Draft what follows: by the simulator's draws right, or another token."""
        if self._drafts is None:
            return
        drafts = []
        for request_id in request_ids:
            given, live = self.live[request_id]
            num_asked = given.num_output_tokens
            is_right = self._drafts.right_ones(num_asked, seed=f"0-{request_id}")
            is_right += [False] * NUM_DRAFTS  # behind its end
            first = live.num_output_tokens
            drafts.append(
                [
                    token_of(given, live.num_tokens + place) + (not is_right[first + place])
                    for place in range(NUM_DRAFTS)
                ]
            )
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(request_ids), drafts))
