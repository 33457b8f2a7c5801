"""Sessions of agents, whose next step comes when a tool has answered: beside vLLM and a host tier.

A step that follows another begins with all that was said before; what of it is computed again is
what neither the pool nor the host had.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from bench.document import Row
from bench.tool_agents import ToolAgents
from bench.who_runs.cases import Regime, deployed, on_gpu
from bench.who_runs.columns import HEAD, figure, table_of
from simulator.deployment import Deployment
from simulator.sessions import AgentSessions, draw_sessions

POLICIES = ("vllm", "vllm-offloading", "evenflow")
OURS = "evenflow"
AGENTS = ToolAgents()
SMALL = "8B, 4090"
DEFINITIONS = {
    "lambda": "bytes that the link moves in a resident decode step / bytes of the KV pool",
    "next TTFT": "from the arrival of a step that follows another to its first token, in seconds",
    "tokens/s": "output tokens, from the first arrival to the last token",
    "cached": "tokens of prompts that were found and not computed / tokens of prompts",
    "recomputed": "tokens that steps computed and a cache without end would have had",
    "refused": "requests larger than the engine can ever hold, per run, which is then of others",
    "vllm-offloading": "vLLM with its OffloadingConnector and as much host memory",
}
COLUMNS = (
    *HEAD,
    figure("next TTFT P50, s", "next_ttft_p50_s", ".3f"),
    figure("P95, s", "next_ttft_p95_s", ".3f"),
    figure("tokens/s", "tokens_per_s", ".1f"),
    figure("cached", "cached", ".1%"),
    figure("recomputed", "recomputed_tokens", ",.0f"),
    figure("refused", "rejected", ".0f"),
)
table = partial(table_of, COLUMNS)


def places() -> dict[str, Deployment]:
    """Return where the agents are, by name: with a pool for a third of them, or the card's own."""
    third = {"pool_tokens": AGENTS.third_tokens, "max_num_seqs": 64}
    return {
        "8B, H100": deployed("llama-3-8b", "h100", **third),
        SMALL: deployed("llama-3-8b", "rtx-4090", max_num_seqs=64),
        "70B, 4 x H100": deployed("llama-3-70b", "h100", num_devices=4, **third),
    }


def regimes() -> dict[str, Regime]:
    """Return the regimes by name."""
    name = f"{AGENTS.num_sessions} agents of {AGENTS.num_steps} steps, 2k + 6k"
    found: dict[str, Regime] = {
        f"{place}, {name}": on_gpu(where, AGENTS.steps) for place, where in places().items()
    }
    tenth = AgentSessions(num_steps=30).scaled(0.1)
    helped = replace(tenth, branch_frac=0.1, subagent_frac=0.05, shared_tokens=1_000)
    for name, drawn_by in (("", tenth), (", branches, sub-agents", helped)):
        found[f"{SMALL}, 12 published sessions, a tenth of the tokens{name}"] = on_gpu(
            places()[SMALL], lambda seed, by=drawn_by: draw_sessions(by, 12, seed=seed)
        )
    whole = deployed("llama-3-70b", "h100", num_devices=8, max_num_seqs=64)
    found["70B, 8 x H100, 12 published sessions"] = on_gpu(
        whole, lambda seed: draw_sessions(AgentSessions(num_steps=30), 12, seed=seed)
    )
    return found


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return a line for each regime and other policy: ours beside it."""
    return [_verdict(ours, other) for ours, other in pairs(rows)]


def pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield our row of each regime and one of another policy."""
    for ours in (row for row in rows if row["policy"] == OURS):
        for other in rows:
            if other["regime"] == ours["regime"] and other["policy"] != OURS:
                yield ours, other


def _verdict(ours: Row, other: Row) -> str:
    """Say how ours compares, and whether it is behind: by 2 % of a TTFT, 1 % of tokens/s."""
    p50, p95, tokens = (
        ours[name] / other[name] for name in ("next_ttft_p50_s", "next_ttft_p95_s", "tokens_per_s")
    )
    num_more = other["rejected"] - ours["rejected"]
    behind = p50 > 1.02 or p95 > 1.02 or tokens < 0.99
    return (
        f"{ours['regime']}: beside {other['policy']} {p50:.3f} x the next step's TTFT at P50, "
        f"{p95:.3f} x at P95, {tokens:.3f} x the tokens/s, {ours['recomputed_tokens']:,.0f} for "
        f"{other['recomputed_tokens']:,.0f} tokens recomputed"
        f"{f', {num_more:.0f} fewer refused' if num_more else ''}{': behind' if behind else ''}"
    )
