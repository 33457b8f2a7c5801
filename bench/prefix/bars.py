"""What the figures are held against."""

from collections.abc import Sequence

from bench.document import Row

OURS, UNCACHED, STOCK = "Evenflow", "Evenflow, cache off", "vLLM, prefix caching"
MAX_OF_UNCACHED = 1 / 5  # of the last turn's time to the first token without the cache
MAX_SLOWER_FRAC = 0.05  # than stock vLLM, where everything fits the pool
MIN_CACHED, MAX_LAST_TTFT = 0.9, 0.3  # x stock vLLM's, of a model with windows
# Of agents that wait for tools: x stock vLLM's.
MAX_NEXT_TTFT_P50, MAX_NEXT_TTFT_P95, MIN_TOKENS, MAX_RECOMPUTED = 0.3, 0.5, 1.2, 0.05


def verdicts(rows: Sequence[Row], *, fits: bool) -> list[str]:
    """Return a line for each bar: what was measured, what it had to be, and whether it is met."""
    by_engine = {row["engine"]: row for row in rows}
    ours, stock = by_engine[OURS], by_engine[STOCK]
    last_s, stock_s = ours["last_ttft_s"], stock["last_ttft_s"]
    slack = MAX_SLOWER_FRAC if fits else 0.0
    bars = [
        ("cache off", last_s, MAX_OF_UNCACHED * by_engine[UNCACHED]["last_ttft_s"]),
        ("stock", last_s, (1 + slack) * stock_s),
    ]
    lines = [
        f"last turn against {name}: {1e3 * found_s:.0f} ms, at most {1e3 * most_s:.0f} ms: "
        f"{_word(found_s <= most_s)}"
        for name, found_s, most_s in bars
    ]
    found, least = ours["tokens_per_s"], (1 - slack) * stock["tokens_per_s"]
    lines.append(
        f"tokens/s against stock: {found:.1f}, at least {least:.1f}: {_word(found >= least)}"
    )
    return lines


def of_windows(rows: Sequence[Row], *, fits: bool) -> list[str]:
    """Return a line on what is found of a model with windows, or on when the last turn begins."""
    by_engine = {row["engine"]: row for row in rows}
    ours, stock = by_engine[OURS], by_engine[STOCK]
    if fits:
        found, least = ours["cached_tokens"], MIN_CACHED * stock["cached_tokens"]
        return [f"cached tokens: {found:,.0f}, at least {least:,.0f}: {_word(found >= least)}"]
    found_s, most_s = ours["last_ttft_s"], MAX_LAST_TTFT * stock["last_ttft_s"]
    return [
        f"last turn against stock: {1e3 * found_s:.0f} ms, at most {1e3 * most_s:.0f} ms: "
        f"{_word(found_s <= most_s)}"
    ]


def of_agents(rows: Sequence[Row]) -> list[str]:
    """Return a line for each bar of agents that wait for tools."""
    by_engine = {row["engine"]: row for row in rows}
    ours, stock = by_engine[OURS], by_engine[STOCK]

    def at_most(words: str, name: str, most: float) -> str:
        met = ours[name] <= most * stock[name]
        return f"{words}: {_times(ours[name], stock[name])}, at most {most} x: {_word(met)}"

    met = ours["tokens_per_s"] >= MIN_TOKENS * stock["tokens_per_s"]
    tokens = _times(ours["tokens_per_s"], stock["tokens_per_s"])
    return [
        at_most("next step's TTFT P50", "next_ttft_p50_s", MAX_NEXT_TTFT_P50),
        at_most("next step's TTFT P95", "next_ttft_p95_s", MAX_NEXT_TTFT_P95),
        f"tokens/s: {tokens}, at least {MIN_TOKENS} x: {_word(met)}",
        at_most("recomputed tokens", "recomputed_tokens", MAX_RECOMPUTED),
    ]


def _times(ours: float, stock: float) -> str:
    """Say what ours is of stock vLLM's, which may be none."""
    return f"{ours / stock:.3f} x stock vLLM's" if stock else f"{ours:g} for stock vLLM's 0"


def _word(met: bool) -> str:
    return "met" if met else "missed"
