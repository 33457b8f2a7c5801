"""A step's parts, one per request: what they compute, and what they copy in."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.placement.types import EngineShape
from simulator.device.costs import StepLoad
from simulator.device.step import StagedRequest
from simulator.memory.requests import SimulatedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request's part of a step."""

    request: SimulatedRequest
    num_tokens: int  # computed, >= 1
    num_before: int  # computed before the step
    num_staged: int  # blocks of each offloaded group that the step copies in
    num_direct: int  # blocks of each offloaded group that the step fills in a staging buffer
    num_recomputed: int = 0  # leading tokens whose KV the step computes anew
    num_drafts: int = 0  # computed behind them, of which the right ones are kept

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1

    @property
    def num_rows(self) -> int:
        """Return what it takes of the step."""
        return self.num_tokens + self.num_drafts


def load_of(turns: Sequence[Turn]) -> StepLoad:
    """Return what a step computes."""
    decodes = [turn for turn in turns if turn.is_decode]
    contexts = tuple(turn.num_before + turn.num_rows for turn in decodes)
    return StepLoad(
        num_decodes=len(decodes),
        num_drafts=sum(turn.num_drafts for turn in decodes),
        num_context_tokens=sum(contexts),
        contexts=contexts,
        chunks=tuple((t.num_tokens, t.num_before) for t in turns if not t.is_decode),
        recomputed=tuple(t.num_recomputed for t in turns if t.num_recomputed),
    )


def staged_of(turns: Sequence[Turn], shape: EngineShape) -> list[StagedRequest]:
    """Return what a step copies in: of offloaded groups all that is on the host.

    A trunk's once for all its users.
    """
    trunks = dict.fromkeys(trunk for turn in turns for trunk in turn.request.kv.trunks)
    shared = [
        StagedRequest(
            offloaded=trunk.offloaded,
            num_buffers=trunk.num_buffers,
            group_bytes=trunk.num_staged * shape.block_bytes,
        )
        for trunk in trunks
        if trunk.offloaded
    ]
    return shared + [
        StagedRequest(
            offloaded=turn.request.kv.offloaded,
            num_buffers=turn.request.kv.num_buffers,
            group_bytes=turn.num_staged * shape.block_bytes,
            filled_bytes=turn.num_direct * shape.block_bytes,
        )
        for turn in turns
        if turn.request.kv.offloaded
    ]
