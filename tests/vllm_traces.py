"""One trace for the simulator's `vllm` and for vLLM, and what is seen of both.

Every step takes one second, so that both count steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from zlib import crc32

from services.placement.types import EngineShape, RequestId
from simulator.device.costs import LinearCosts
from simulator.device.drafts import Drafts
from simulator.engine.machine import Machine
from simulator.engine.planning import PlanningOptions
from simulator.engine.simulation import simulate
from simulator.engine.vllm import VllmOptions
from simulator.workload import HASHED_TOKENS, ArrivingRequest

BLOCK_SIZE = 32
MAX_TOKENS = 1_600


@dataclass(frozen=True, kw_only=True)
class Engine:
    num_blocks: int  # of BLOCK_SIZE tokens
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    vllm: VllmOptions = field(default_factory=VllmOptions)
    drafts: Drafts | None = None
    num_host_blocks: int = 0  # of the OffloadingConnector


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One request: what it found when it came in first, how often it gave way, its last step."""

    num_cached_tokens: int
    num_preemptions: int
    ended_s: float


def simulated(engine: Engine, requests: Sequence[ArrivingRequest]) -> dict[str, Seen]:
    """Return what the simulator does with a trace.

    It imports llvmlite, after which vLLM starts no engine in this process: its workers look at
    every attribute of every module, and llvmlite's library answers to any name.
    """
    from simulator.compose import make_engine

    num_groups = 4
    shape = EngineShape(
        num_layers=num_groups,
        layers_per_group=1,
        block_size=BLOCK_SIZE,
        num_blocks=engine.num_blocks * num_groups,
        block_bytes=1_000,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        num_host_blocks=engine.num_host_blocks * num_groups,
        max_model_len=MAX_TOKENS,
        max_ahead_tokens=engine.drafts.num_drafts if engine.drafts else 0,
    )
    one_second = LinearCosts(layer_base_s=0.0, per_token_s=0.0, outside_step_s=1.0)
    machine = Machine(costs=one_second, link_bytes_per_s=1e9, drafts=engine.drafts)
    options = PlanningOptions(policy="vllm", vllm=engine.vllm)
    made = make_engine(shape, machine, options)
    record = simulate(made, requests, after_event=lambda event: made.check_integrity())
    return {
        one.request_id: Seen(
            num_cached_tokens=one.num_cached_tokens,
            num_preemptions=one.num_preemptions,
            ended_s=one.generated_s[-1],
        )
        for one in record.outcomes
        if not one.rejected
    }


def token_of(request: ArrivingRequest, position: int) -> int:
    """Return a token that stands where the same ones stand in requests that begin alike."""
    hashed = min(request.num_prompt_tokens, HASHED_TOKENS * len(request.prompt_hashes))
    if request.conversation:
        key: object = (request.conversation, position)
    elif position < hashed:
        key = (request.prompt_hashes[position // HASHED_TOKENS], position % HASHED_TOKENS)
    else:
        key = (request.request_id, position)
    return crc32(repr(key).encode())


def asked(
    name: str, arrival_s: float, num_prompt: int, num_output: int, **begins: Any
) -> ArrivingRequest:
    return ArrivingRequest(
        request_id=RequestId(name),
        arrival_s=arrival_s,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        **begins,
    )


# Four begin alike while the first is computed; a twin comes in its middle; turns of a conversation;
# the pool holds about three of them, so that some give way.
TRACE = [
    *(asked(f"agent{i}", 0.0, 700 + 40 * i, 90, prompt_hashes=(1,)) for i in range(4)),
    asked("turn1", 3.0, 300, 60, conversation="c"),
    asked("alone", 4.0, 500, 200),
    asked("branch", 5.0, 1_100, 40, prompt_hashes=(1, 2)),
    asked("turn2", 200.0, 420, 60, conversation="c"),
    asked("turn3", 320.0, 640, 60, conversation="c"),
]


class Stepped(Protocol):
    """An engine that is told when a step ends."""

    live: Mapping[str, Any]
    seen: dict[str, Seen]

    def add(self, request: ArrivingRequest) -> None: ...
    def step(self, end_s: float) -> None: ...


def drive(engine: Stepped, requests: Sequence[ArrivingRequest]) -> dict[str, Seen]:
    """Run all requests; every step takes a second, and one begins as soon as somebody is there."""
    pending = sorted(requests, key=lambda request: request.arrival_s)
    now_s = -1.0
    while pending or engine.live:
        if not engine.live and pending[0].arrival_s > now_s:
            now_s = pending[0].arrival_s
            engine.add(pending.pop(0))  # a step begins at once, without those who come with it
        else:
            while pending and pending[0].arrival_s <= now_s:
                engine.add(pending.pop(0))
        now_s += 1.0
        engine.step(now_s)
        assert now_s < 20_000, "vLLM makes no progress"
    return engine.seen
