"""What the papers say of their figures, and what the same figures say here.

The papers' numbers are of their text. A row appears where its figures were simulated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from bench.e2e.systems import ORBITFLOW as COMPONENTS
from bench.papers.cells import Found
from bench.papers.orbitflow import BASELINES, LOAD, SCALE, STRESS_LOAD, STRONGEST
from bench.papers.sections import Stated
from bench.papers.tokenflow import MIXED_TPS, OVER_TIME, Count

ADAPTIVE = ("flexgen-plus", "slo-aware", "dynamic-heuristic")  # OrbitFlow's word


@dataclass(frozen=True, slots=True)
class Claim:
    """One row."""

    place: str
    figures: tuple[str, ...]  # that it is read from
    claim: str
    here: Callable[["Means"], str]


class Means:
    """Figures of simulated cells, means over seeds."""

    def __init__(self, found: Found) -> None:
        self._found = found

    def has(self, figures: Sequence[str]) -> bool:
        return all(name in self._found for name in figures)

    def xs(self, figure: str) -> list[float]:
        return sorted({point.x for point, _ in self._found[figure]})

    def of(
        self,
        figure: str,
        policy: str,
        name: str,
        *,
        x: float | None = None,
        scale: float | None = None,
    ) -> float:
        """Return a figure of a policy (its name in the tables) at an x and an SLO scale.

        None: at all of them. Raises StatisticsError if there is no such cell.
        """
        return fmean(
            result.figures[name]
            for point, result in self._found[figure]
            if point.cell.name == policy
            and x in (None, point.x)
            and scale in (None, point.cell.slo_scale)
        )

    def changes(
        self, figures: Sequence[str], base: str, name: str, policies: Sequence[str], **at: float
    ) -> str:
        """Say by how much policies differ from another, as a range over figures."""
        said = []
        for policy in policies:
            values = [
                100.0 * (self.of(one, policy, name, **at) / self.of(one, base, name, **at) - 1.0)
                for one in figures
            ]
            said.append(f"{policy} {_range(values)} %")
        return "; ".join(said)

    def shares(self, figure: str, name: str, policies: Sequence[str], **at: float) -> str:
        """Say a share of each policy, as a range over x."""
        xs = [at.pop("x")] if "x" in at else self.xs(figure)
        said = []
        for policy in policies:
            values = [100.0 * self.of(figure, policy, name, x=x, **at) for x in xs]
            said.append(f"{policy} {_range(values, signed=False)} %")
        return "; ".join(said)

    def most(
        self, figure: str, count: Count, policies: Sequence[str], *, x: float | None = None
    ) -> str:
        """Say the most requests of a kind that each policy comes to."""
        return self._over_time(figure, lambda samples: max(map(count, samples)), policies, x)

    def on_average(
        self, figure: str, count: Count, policies: Sequence[str], *, x: float | None = None
    ) -> str:
        """Say how many requests of a kind each policy has, as a mean over time."""

        def mean(samples: Sequence[Sequence[float]]) -> float:
            spans = [(count(now), later[0] - now[0]) for now, later in pairwise(samples)]
            return sum(n * s for n, s in spans) / sum(s for _, s in spans)

        return self._over_time(figure, mean, policies, x)

    def _over_time(
        self,
        figure: str,
        of: Callable[[Sequence[Sequence[float]]], float],
        policies: Sequence[str],
        x: float | None,
    ) -> str:
        found: dict[str, list[float]] = {policy: [] for policy in policies}
        for point, result in self._found[figure]:
            if point.cell.name in found and x in (None, point.x):
                found[point.cell.name].append(of(result.view["residency"]))
        return "; ".join(f"{policy} {fmean(values):.0f}" for policy, values in found.items())


def _range(values: Sequence[float], *, signed: bool = True) -> str:
    return _span(values, "+.0f" if signed else ".0f")


def _span(values: Sequence[float], form: str) -> str:
    low, high = (f"{value:{form}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def claims(found: Found, rows: Sequence[Claim]) -> Stated:
    """Return the rows whose figures were simulated."""
    means = Means(found)
    return Stated(
        title="What the paper says, and what its figures say here",
        heads=["place", "the paper", "here"],
        rows=[[row.place, row.claim, row.here(means)] for row in rows if means.has(row.figures)],
        is_prose=True,
    )


def _at_each_x(
    figure: str, base: str, name: str, policies: Sequence[str], axis: str = ""
) -> Callable[[Means], str]:
    def said(means: Means) -> str:
        return ". ".join(
            f"{axis}{x:g}: " + means.changes((figure,), base, name, policies, x=x)
            for x in means.xs(figure)
        )

    return said


# -- TokenFlow -------------------------------------------------------------------------------------

BURSTS_4090 = ("4090 (a)", "4090 (b)")
BURSTS_H200 = ("H200 (a)", "H200 (b)")
BURSTS = (*BURSTS_4090, *BURSTS_H200)
POISSON_4090 = ("4090 (c)", "4090 (d)")
POISSON_H200 = ("H200 (c)", "H200 (d)")
TURNS = ("tokenflow", "evenflow")


def _beside_sglang(figures: Sequence[str], name: str) -> Callable[[Means], str]:
    return lambda means: means.changes(figures, "sglang", name, TURNS)


def _by_interval(means: Means) -> str:
    return "; ".join(
        f"{x:g} s: {means.of('22', 'tokenflow', 'effective_tokens_per_s', x=x):.0f} tokens/s, "
        f"TTFT {means.of('22', 'tokenflow', 'ttft_s', x=x):.0f} s"
        for x in means.xs("22")
    )


def _by_mu(means: Means) -> str:
    return "; ".join(
        f"mu {x:g}: {means.of('23', 'tokenflow', 'preemptions', x=x):.0f} parks, rebuffering "
        f"{100 * means.of('23', 'tokenflow', 'rebuffering', x=x):.0f} %"
        for x in means.xs("23")
    )


def _queued_and_running(means: Means) -> str:
    policies = ("sglang", "andes", *TURNS)
    return ". ".join(
        f"{title} at most: {means.most('14', count, policies)}"
        for title, count in OVER_TIME.items()
    )


TOKENFLOW = (
    Claim("Fig. 12", ("12",), "H200: effective throughput +37.1 %",
          _beside_sglang(("12",), "effective_tokens_per_s")),
    Claim("Fig. 13", ("13",), "A6000: effective throughput +45.1 %",
          _beside_sglang(("13",), "effective_tokens_per_s")),
    Claim("Fig. 12, 13", ("12", "13"), "mean TTFT -52.6 % on average",
          _beside_sglang(("12", "13"), "ttft_s")),
    Claim("Fig. 12, 13", ("12", "13"), "P50 of TTFT down to -88.7 %",
          _beside_sglang(("12", "13"), "ttft_p50_s")),
    Claim("Fig. 14, 15", ("14",), "fewer queued requests and more running ones at the peak",
          _queued_and_running),
    Claim("Fig. 16, 4090", BURSTS_4090, "P99 TTFT down to -80.2 %",
          _beside_sglang(BURSTS_4090, "ttft_p99_s")),
    Claim("Fig. 16, 4090", BURSTS_4090, "mean TTFT down to -48.4 %",
          _beside_sglang(BURSTS_4090, "ttft_s")),
    Claim("Fig. 16, 4090", BURSTS_4090, "effective throughput up to +52.9 %",
          _beside_sglang(BURSTS_4090, "effective_tokens_per_s")),
    Claim("Fig. 16, H200", BURSTS_H200, "the same",
          lambda means: ". ".join(
              f"{title} " + means.changes(BURSTS_H200, "sglang", name, TURNS)
              for title, name in (("P99 TTFT", "ttft_p99_s"), ("mean TTFT", "ttft_s"),
                                  ("effective", "effective_tokens_per_s")))),
    Claim("Fig. 16", BURSTS, "raw throughput as SGLang's", _beside_sglang(BURSTS, "tokens_per_s")),
    Claim("Fig. 17, 4090", POISSON_4090, "effective throughput +82.5 %",
          _beside_sglang(POISSON_4090, "effective_tokens_per_s")),
    Claim("Fig. 17, H200", POISSON_H200, "TTFT -53.7 %", _beside_sglang(POISSON_H200, "ttft_s")),
    Claim("Fig. 19", ("19",), "readers of 15 and of 20 tokens/s each get their rate",
          lambda means: ". ".join(
              f"TPOT met behind the deposit at {rate:g}: "
              + means.shares("19", f"tpot_deposit at {rate:g}/s", ("sglang", *TURNS))
              for rate in sorted(set(MIXED_TPS)))),
    Claim("Fig. 20", ("20",), "more throughput at 20, 25 and 30 tokens/s read",
          _at_each_x("20", "sglang", "effective_tokens_per_s", TURNS)),
    Claim("Fig. 22", ("22",), "a shorter interval is marginally better", _by_interval),
    Claim("Fig. 23", ("23",), "mu = 20 behaves as SGLang, mu = 1 may stutter", _by_mu),
)  # fmt: skip


# -- LayerKV ---------------------------------------------------------------------------------------

LAYERED = ("layerkv", "layerkv-park", "evenflow")


def _ratios(figure: str, name: str) -> Callable[[Means], str]:
    """Say how many times less each policy's figure is than vLLM's, where it is least."""

    def said(means: Means) -> str:
        parts = []
        for policy in LAYERED:
            best = max(
                means.of(figure, "vllm", name, x=x) / means.of(figure, policy, name, x=x)
                for x in means.xs(figure)
            )
            parts.append(f"{policy} 1/{best:.0f}" if best >= 2 else f"{policy} 1/{best:.1f}")
        return "; ".join(parts)

    return said


def _fewer_violations(means: Means) -> str:
    parts = []
    for policy in LAYERED:
        shares = [
            [means.of("6", one, "violations", x=x) for one in ("vllm", policy)]
            for x in means.xs("6")
        ]
        fewer = [100.0 * (theirs - own) for theirs, own in shares]
        parts.append(f"{policy} {_range(fewer)} points fewer")
    return "; ".join(parts)


LAYERKV = (
    Claim("Fig. 4", ("4 llama-2-7b",), "7B: TTFT lower by up to an order of magnitude",
          _ratios("4 llama-2-7b", "ttft_s")),
    Claim("Fig. 4", ("4 llama-2-7b",), "7B: throughput nearly the same",
          _at_each_x("4 llama-2-7b", "vllm", "tokens_per_s", LAYERED)),
    Claim("Fig. 4", ("4 yi-34b",), "34B: TTFT lower by up to an order of magnitude",
          _ratios("4 yi-34b", "ttft_s")),
    Claim("Fig. 4", ("4 llama-3-70b",), "70B: the same", _ratios("4 llama-3-70b", "ttft_s")),
    Claim("Fig. 5", ("5",), "more GPUs: TTFT lower throughout",
          _at_each_x("5", "vllm", "ttft_s", LAYERED)),
    Claim("Fig. 6", ("6",), "mean TTFT down to 1/69", _ratios("6", "ttft_s")),
    Claim("Fig. 6", ("6",), "throughput less than 3 % lower",
          _at_each_x("6", "vllm", "tokens_per_s", LAYERED)),
    Claim("Fig. 7", ("6",), "P99 TTFT down to 1/45", _ratios("6", "ttft_p99_s")),
    Claim("Fig. 8", ("6",), "17.7 to 28.7 points fewer violations", _fewer_violations),
)  # fmt: skip


# -- OrbitFlow -------------------------------------------------------------------------------------


def _attainment(name: str, deposit: str, **at: float) -> Callable[[Means], str]:
    """Say a share of the best system without a deposit, and of orbitflow with it."""

    def said(means: Means) -> str:
        best = max(BASELINES, key=lambda policy: means.of("8", policy, name, **at))
        ours = means.shares("8", deposit, ("orbitflow",), **at)
        queue = means.shares("8", deposit, ("vllm",), **at)
        return f"{ours}; {means.shares('8', name, (best,), **at)}, the best other; {queue}"

    return said


def _of_components(scale: float) -> Callable[[Means], str]:
    """Say the tokens in time of each; the last one's are behind the deposit."""
    names = dict.fromkeys(COMPONENTS, "tbt") | {COMPONENTS[-1]: "tbt_deposit"}
    return lambda means: ", ".join(
        f"{100 * means.of('14a', policy, name, scale=scale):.0f}" for policy, name in names.items()
    )


def _tails(means: Means) -> str:
    at = {"scale": 1.0}
    return "; ".join(means.changes(("8",), base, "p95_s", ("orbitflow",), **at) + f" of {base}'s"
                     for base in ("flexgen", "deepspeed", "vllm"))  # fmt: skip


def _throughput(means: Means) -> str:
    at = {"scale": SCALE, "x": LOAD}
    ours = means.of("8", "orbitflow", "tokens_per_s", **at)
    return ", ".join(
        f"{ours / means.of('8', base, 'tokens_per_s', **at):.2f} x {base}"
        for base in (*BASELINES, "vllm")
    )


def _shortest_first(means: Means) -> str:
    return ". ".join(
        f"{title} " + means.changes(("13",), "orbitflow", name, ("orbitflow, srtf",))
        for title, name in (
            ("mean TTFT", "ttft_s"),
            ("P95", "ttft_p95_s"),
            ("P95 TPOT", "tpot_p95_s"),
            ("tokens/s", "tokens_per_s"),
        )
    )


def _gained_by_deposit(means: Means) -> str:
    gained = []
    for policy in STRONGEST:
        with_it, without = (
            means.of("8", policy, name, scale=2.5) for name in ("tbt_deposit", "tbt")
        )
        gained.append(f"{policy} {100.0 * (with_it - without):+.0f}")
    return "; ".join(gained)


ORBITFLOW = (
    Claim("Fig. 8a", ("8",), "over 75 % of TBT at high rates and the tight SLO",
          _attainment("tbt", "tbt_deposit", x=STRESS_LOAD, scale=1.0)),
    Claim("Fig. 8a", ("8",), "TBT attainment up to +66 % (tight SLO, load 3)",
          _attainment("tbt", "tbt_deposit", x=LOAD, scale=1.0)),
    Claim("Fig. 8a", ("8",), "TPOT attainment up to +62 %",
          _attainment("tpot", "tpot_deposit", x=LOAD, scale=1.0)),
    Claim("Fig. 8b", ("8",), "P95 at S x 1: -21.7 % of FlexGen's, -68.6 % of DeepSpeed's", _tails),
    Claim("Fig. 8c", ("8",), "E2E 12 to 21 % longer than the adaptive systems'",
          lambda means: "; ".join(
              means.changes(("8",), base, "e2e_s", ("orbitflow",)) + f" of {base}'s"
              for base in ADAPTIVE)),
    Claim("Fig. 9d", ("8",), "throughput 3.3 x DeepSpeed's, 1.04 to 1.52 x the others'",
          _throughput),
    Claim("Fig. 10", ("10",), "over 85 % at every context; at 128k 69.2 % FlexGen+, 32.9 % Dynamic "
          "Heuristic", lambda means: means.shares("10", "tbt_deposit", STRONGEST)),
    Claim("Fig. 11", ("11",), "more than the others with 2 and 4 GPUs",
          lambda means: means.shares("11", "tbt_deposit", STRONGEST)),
    Claim("Fig. 12a", ("12a",), "over 90 % for CV 1 to 6",
          lambda means: means.shares("12a", "tbt_deposit", STRONGEST)),
    Claim("Fig. 12b", ("12b",), "as many in time whatever the batch size",
          lambda means: means.shares("12b", "tbt_deposit", STRONGEST)),
    Claim("Fig. 13", ("13",), "SRTF: mean TTFT -40 %, P95 -24 %, P95 TPOT +29 %, throughput -8 %",
          _shortest_first),
    Claim("Fig. 13", ("13",), "TPOT met: 97.2 %, with SRTF 92.4 %",
          lambda means: means.shares("13", "tpot_deposit", ("orbitflow", "orbitflow, srtf"))),
    Claim("Fig. 14a", ("14a",), "S x 1: uniform 45.1 %, per request 54.5 %, with pauses 71.0 %, "
          "with the deposit 85.6 %", _of_components(1.0)),
    Claim("Fig. 14b", ("8",), "the deposit at S x 2.5: +18 points FlexGen+, +11 Dynamic Heuristic, "
          "+5 OrbitFlow", _gained_by_deposit),
    Claim("Section 5.4", ("8",), "7.04 % of the time for prompts",
          lambda means: means.shares("8", "prefill", ("orbitflow",), x=LOAD, scale=SCALE)
          + ", of whole steps that have a prompt"),
)  # fmt: skip


# -- eLLM ------------------------------------------------------------------------------------------


THEIRS = ("vllm-recompute", "vllm-swap", "hcache")  # eLLM's baselines
ELLM_SYSTEMS = (*THEIRS, "ellm", "evenflow")
ELLM_13B, ELLM_70B, ELLM_L_EVAL = "13B, ShareGPT", "70B, ShareGPT", "70B, L-Eval"
GOODPUT_SHARE = 0.9  # of requests that meet the SLO, as in section 6.4


def _multiples(figure: str, name: str) -> Callable[[Means], str]:
    """Say how many times each baseline's figure a policy's is, as a range over loads."""

    def said(means: Means) -> str:
        parts = []
        for policy in ("ellm", "evenflow"):
            found = []
            for base in THEIRS:
                values = [
                    means.of(figure, policy, name, x=x) / means.of(figure, base, name, x=x)
                    for x in means.xs(figure)
                ]
                found.append(_span(values, ".2f"))
            parts.append(f"{policy} {', '.join(found)}")
        return "; ".join(parts)

    return said


def _met(figure: str) -> Callable[[Means], str]:
    policies = ("ellm", "evenflow", *THEIRS)
    return lambda means: means.shares(figure, "tpot", policies)


def _running(means: Means) -> str:
    count, x = OVER_TIME["Running requests"], max(means.xs(ELLM_70B))
    mean = means.on_average(ELLM_70B, count, ELLM_SYSTEMS, x=x)
    return f"load {x:g}: {mean}. At most: {means.most(ELLM_70B, count, ELLM_SYSTEMS, x=x)}"


def _goodput(means: Means) -> str:
    """Say the highest load at which so many requests meet the SLO."""
    parts = []
    for policy in ELLM_SYSTEMS:
        held = [
            x
            for x in means.xs(ELLM_L_EVAL)
            if means.of(ELLM_L_EVAL, policy, "tpot", x=x) >= GOODPUT_SHARE
        ]
        parts.append(f"{policy} {max(held):g}" if held else f"{policy} none")
    return "; ".join(parts)


def _ttft_over_load(means: Means) -> str:
    return ". ".join(
        f"load {x:g}: "
        + "; ".join(
            f"{policy} {means.of(ELLM_L_EVAL, policy, 'ttft_s', x=x):.0f} s"
            for policy in ELLM_SYSTEMS
        )
        for x in means.xs(ELLM_L_EVAL)
    )


ELLM = (
    Claim("Fig. 10a", (ELLM_13B,), "13B: 2.64 x vLLM-Recompute's tokens/s, 2.61 x vLLM-Swap's, "
          "1.91 x HCache's", _multiples(ELLM_13B, "tokens_per_s")),
    Claim("Fig. 10a", (ELLM_70B,), "70B: 2.0 x, 2.0 x, 1.6 x",
          _multiples(ELLM_70B, "tokens_per_s")),
    Claim("Fig. 10b", (ELLM_13B,), "13B: TTFT 1/2.63, 1/2.59, 1/1.7 of theirs",
          _multiples(ELLM_13B, "ttft_s")),
    Claim("Fig. 10b", (ELLM_70B,), "70B: 1/1.62, 1/1.61, 1/1.21", _multiples(ELLM_70B, "ttft_s")),
    Claim("Fig. 10c", (ELLM_13B,), "13B: 97.3 % of requests within the TPOT SLO", _met(ELLM_13B)),
    Claim("Fig. 10c", (ELLM_70B,), "70B: 98.6 %", _met(ELLM_70B)),
    Claim("Fig. 11", (ELLM_70B,), "running at a time, 70B: 223, 221, 241, eLLM 255, at most 448",
          _running),
    Claim("Fig. 12a", (ELLM_L_EVAL,), "L-Eval: 2.73 x, 3.03 x, 1.61 x their tokens/s",
          _multiples(ELLM_L_EVAL, "tokens_per_s")),
    Claim("Fig. 12b", (ELLM_L_EVAL,), "L-Eval: TTFT 1/1.76, 1/1.71, 1/1.37 of theirs",
          _multiples(ELLM_L_EVAL, "ttft_s")),
    Claim("Fig. 12c", (ELLM_L_EVAL,), "L-Eval, 70B: 97.4 % within the TPOT SLO",
          _met(ELLM_L_EVAL)),
    Claim("Fig. 14", (ELLM_L_EVAL,), "70B: TTFT stable up to 2.5 x the trace's load, theirs to 2 x",
          _ttft_over_load),
    Claim("Fig. 15", (ELLM_L_EVAL,), "70B: 90 % within the SLO at 1.67 x HCache's load, over 5 x "
          "vLLM's", _goodput),
)  # fmt: skip

CLAIMS: Mapping[str, Sequence[Claim]] = {
    "orbitflow": ORBITFLOW,
    "tokenflow": TOKENFLOW,
    "layerkv": LAYERKV,
    "ellm": ELLM,
}
