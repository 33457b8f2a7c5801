"""A prompt whose KV does not fit the pool, and what layer-wise KV did while it was answered."""

from collections import Counter
from dataclasses import dataclass

from cli.client.answer import PacedAnswer, stream_answer
from cli.client.engine_watch import EngineState, followed
from cli.local.settings import StackSettings
from demo.kv_figures import KVFigures, read_figures
from demo.questions import question
from demo.texts import QUESTION, long_text
from evenflow.executor.v1 import executor_pb2 as pb

UPDATES_PER_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """Where the KV of a request's layer groups is."""

    num_resident: int = 0
    num_offloaded: int = 0

    @classmethod
    def of(cls, state: EngineState) -> "LayerGroups":
        """Count those of all requests that an engine has."""
        counts = Counter(where for row in state.rows for where in row.request.residency)
        num_offloaded = counts.pop(pb.RESIDENCY_OFFLOADED, 0)
        return cls(num_resident=counts.total(), num_offloaded=num_offloaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongAnswer:
    """The answer, the figures before and after it, and when the most layers were away."""

    answer: PacedAnswer
    before: KVFigures
    during: LayerGroups
    after: KVFigures

    def report(self) -> str:
        """Say what happened to the KV."""
        during = self.during
        num_groups = during.num_resident + during.num_offloaded
        needed = num_groups * -(-self.answer.num_prompt_tokens // self.after.block_size)
        loaded_mb = (self.after.h2d_bytes - self.before.h2d_bytes) / 1e6
        saved_mb = (self.after.d2h_bytes - self.before.d2h_bytes) / 1e6
        stalled_ms = (self.after.stall_s - self.before.stall_s) * 1e3
        return (
            f"prompt                {self.answer.num_prompt_tokens} tokens: {needed} KV blocks, "
            f"in a pool of {self.after.pool_blocks}\n"
            f"layer groups          {during.num_resident} resident, "
            f"{during.num_offloaded} offloaded\n"
            f"bytes moved           {loaded_mb:.1f} MB from host memory, {saved_mb:.1f} MB to it\n"
            f"layers waited         {stalled_ms:.0f} ms for copies, in "
            f"{self.answer.num_tokens} tokens"
        )


def show_long_prompt(settings: StackSettings, rate_tps: float, num_tokens: int) -> LongAnswer:
    """Ask behind a long text, print the answer as it comes."""
    before, during = read_figures(settings), LayerGroups()

    def see(state: EngineState) -> None:
        nonlocal during
        during = max(during, LayerGroups.of(state), key=lambda groups: groups.num_offloaded)

    with followed(settings.address("executor"), updates_per_s=UPDATES_PER_S, see=see):
        answer = stream_answer(
            settings.base_url,
            settings.model_id,
            question(QUESTION, context=long_text(), max_tokens=num_tokens),
            rate_tps=rate_tps,
            show=lambda piece: print(piece, end="", flush=True),
        )
    return LongAnswer(answer=answer, before=before, during=during, after=read_figures(settings))
