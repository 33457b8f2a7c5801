"""Engines of other models and options over two nodes: tokens are those of one process."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.drafts import save_eagle_head
from lab.engine.step_runner import EngineCase
from lab.engine.workloads import mixed
from lab.executor_client import GatewayStream
from lab.known_drafts import KNOWN_ANSWERS, known_drafts, save_answers
from lab.stack.executor_process import ExecutorProcess
from tests.exact.cases import make_case
from tests.exact.drafts import eagle_drafts, known_answers
from tests.exact.kinds import kind_case, kind_reference
from tests.exact.latent_cases import alone, latent_case
from tests.exact.reference import reference
from tests.nodes import network
from tests.nodes.asking import ask, moved_bytes
from tests.nodes.group import STAGE_ARGUMENTS, WITH_STAGES, Group

WHY_NOT = network.why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are two nodes"),
    pytest.mark.timeout(3_600),
]

Tokens = Mapping[str, list[int]]  # by request
AT_ONCE = tuple(mixed(8))
ONE_BY_ONE = (*mixed(8)[:4], *alone())  # the last takes more than the pool
RIGHT_FRAC = 0.8  # of drafts
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}


@dataclass(frozen=True, kw_only=True)
class Other:
    """An engine, and stock vLLM's answers to what is asked at once.

    `expected` None: tokens depend on who else is in a step, so that one request is asked at a time,
    and the answers are those of both ranks on one node, with vLLM's own KV.
    """

    case: EngineCase
    expected: Callable[[], Tokens] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def of_kind(name: str, folder: Path, **engine: Any) -> Other:
    return Other(
        case=kind_case(name, **engine), expected=lambda: kind_reference(name)["mixed"].tokens
    )


def of_delta_nets(folder: Path, **engine: Any) -> Other:
    """Gated delta nets, whose kernels take bf16 only."""
    return Other(case=kind_case("qwen3_next", num_blocks=24, **engine))


def of_latents(folder: Path) -> Other:
    return Other(case=latent_case(num_ranks=2))


def of_latents_in_stages(folder: Path) -> Other:
    case = latent_case()
    return Other(case=replace(case, num_blocks=case.num_blocks // 2 + 1, **STAGES))


def with_drafts(folder: Path, **engine: Any) -> Other:
    save_answers(folder / "answers.json", known_answers().items())
    known = {"path": str(folder / "answers.json"), "right_frac": RIGHT_FRAC}
    return Other(
        case=make_case(share=0.7, speculative=known_drafts(num_drafts=3), **engine),
        expected=lambda: reference("float32")["mixed"].tokens,
        environment={KNOWN_ANSWERS: json.dumps(known)},
    )


def with_head(folder: Path, **engine: Any) -> Other:
    (folder / "head").mkdir()
    save_eagle_head(folder / "head")
    return Other(
        case=make_case(share=0.7, speculative=eagle_drafts(folder / "head"), **engine),
        expected=lambda: reference("float32")["mixed"].tokens,
    )


LAYERS: dict[str, Callable[[Path], Other]] = {
    "experts-and-windows": partial(of_kind, "gpt_oss", num_blocks=110, **TENSOR),
    "states": partial(of_kind, "granite4", num_blocks=50, **TENSOR),
    "delta-nets-and-experts": partial(of_delta_nets, **TENSOR),
    "latents": of_latents,
    "latents-in-stages": of_latents_in_stages,
    "drafts": partial(with_drafts, **TENSOR),
    "drafts-of-a-head": partial(with_head, **TENSOR),
}
MARKS = {
    "delta-nets-and-experts": pytest.mark.skipif(
        not torch.cpu._is_avx512_bf16_supported(), reason="the kernels need AVX-512 with bf16"
    )
}
WHOLE: dict[str, Callable[[Path], Other]] = {
    "experts-and-windows": LAYERS["experts-and-windows"],
    "states": LAYERS["states"],
    "drafts": LAYERS["drafts"],
    "latents": of_latents,
    "latents-in-stages": of_latents_in_stages,
    "experts-and-windows-in-stages": partial(of_kind, "gpt_oss", num_blocks=110, **STAGES),
}


def settings_of(case: EngineCase, *, layerwise: bool) -> dict[str, Any]:
    """Return an executor's settings; with layer-wise KV of a pool that is too small."""
    settings: dict[str, Any] = {
        "MODEL": case.model.directory(),
        "SERVED_MODEL_NAME": "exactness",  # as requests name it
        "DTYPE": case.dtype,
        "TENSOR_PARALLEL_SIZE": case.tensor_parallel_size,
        "PIPELINE_PARALLEL_SIZE": case.pipeline_parallel_size,
        "BLOCK_SIZE": case.block_size,
        "MAX_MODEL_LEN": case.max_model_len,
        "MAX_NUM_SEQS": case.max_num_seqs,
        "MAX_NUM_BATCHED_TOKENS": case.max_num_batched_tokens,
        "ENABLE_PREFIX_CACHING": False,
        "PLANNER_ADDRESS": "",
        "POLICY": "evenflow",
    }
    if layerwise and case.kv is not None:
        settings |= {
            "LAYERWISE_KV": True,
            "KV_HOST_MEMORY_BYTES": case.kv.host_bytes,
            "NUM_GPU_BLOCKS_OVERRIDE": case.num_blocks,
        }
    arguments = list[str]()
    if case.attention_backend is not None:
        arguments += ["--attention-backend", case.attention_backend]
    if case.speculative is not None:
        arguments += ["--speculative-config", json.dumps(dict(case.speculative))]
    if case.pipeline_parallel_size > 1:
        settings |= WITH_STAGES
        arguments += STAGE_ARGUMENTS
    return {**settings, "ENGINE_ARGS": json.dumps(arguments)}


async def answers_of(address: str, other: Other) -> Tokens:
    """Return the answers of an engine."""
    async with GatewayStream(address) as gateway:
        if other.expected is not None:
            answers = await ask(gateway, AT_ONCE)
        else:
            answers = {}
            for arrival in ONE_BY_ONE:
                answers |= await ask(gateway, [arrival])
    return {name: answer.ids for name, answer in answers.items()}


async def expected_of(other: Other, folder: Path) -> Tokens:
    """Return the answers that both nodes must give."""
    if other.expected is not None:
        tokens = await asyncio.to_thread(other.expected)
        return {arrival.request_id: tokens[arrival.request_id] for arrival in AT_ONCE}
    one_node = ExecutorProcess(folder / "one_node.log", **settings_of(other.case, layerwise=False))
    with one_node.serving():
        return await answers_of(one_node.address, other)


@pytest.mark.parametrize(
    ("made", "layerwise"),
    [
        *(
            pytest.param(made, True, id=f"{name}-layerwise", marks=MARKS.get(name, ()))
            for name, made in LAYERS.items()
        ),
        *(pytest.param(made, False, id=name) for name, made in WHOLE.items()),
    ],
)
async def test_tokens_are_those_of_one_process(
    made: Callable[[Path], Other], layerwise: bool, tmp_path: Path
) -> None:
    other = made(tmp_path)
    expected = await expected_of(other, tmp_path)
    group = Group(
        tmp_path, environment=other.environment, **settings_of(other.case, layerwise=layerwise)
    )
    with group.running():
        await asyncio.to_thread(group.leader.wait_serving)
        tokens = await answers_of(group.leader.address, other)
        assert (moved_bytes(group) > 0) == layerwise
    assert tokens == expected
