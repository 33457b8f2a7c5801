"""How far a simulated run is from the real one. Pure."""

import statistics
from collections.abc import Sequence

from bench.e2e.figures import quantile, request_figures, share
from bench.e2e.records import RunRecord

QUANTILES = tuple(k / 20 for k in range(1, 20))
BARS = {"step": 0.05, "ttft": 0.10, "tbt": 0.03, "tbt_deposit": 0.03, "tpot": 0.03}
DEFINITIONS = {
    "step": "mean over the 5 %, 10 %, ... 95 % quantiles of the gaps between a request's tokens of "
    "|simulated - real| / real",
    "mean_step": "(simulated - real) / real of the mean gap",
    "request_tpot": "mean over requests of |simulated - real| / real of their mean gap",
    "ttft": "|simulated - real| / real of the mean time to the first token",
    "tbt, tbt_deposit, tpot, tpot_deposit": "simulated - real attainment, as a share; what is "
    "attained is defined in bench.e2e",
    "pauses": "simulated, with the warm-up before the run / of the run",
    "()": "runs of the seed that also calibrates; all others are held out",
}


def errors(real: RunRecord, simulated: RunRecord) -> dict[str, float]:
    """Return the errors of one configuration. Both runs have the same requests, in one order."""
    pairs = [
        (request_figures(a, real.slo_s), request_figures(b, real.slo_s))
        for a, b in zip(real.requests, simulated.requests, strict=True)
    ]
    ours, theirs = [b for _, b in pairs], [a for a, _ in pairs]
    gaps_s = [sorted(gap for r in side for gap in r.gaps_s) for side in (theirs, ours)]
    ttfts_s = [statistics.fmean(r.ttft_s for r in side) for side in (theirs, ours)]
    found = {
        "step": _mean_error([[quantile(gaps, q) for q in QUANTILES] for gaps in gaps_s]),
        "mean_step": statistics.fmean(gaps_s[1]) / statistics.fmean(gaps_s[0]) - 1.0,
        "request_tpot": _mean_error(
            [[statistics.fmean(r.gaps_s) for r in side if r.gaps_s] for side in (theirs, ours)]
        ),
        "ttft": abs(ttfts_s[1] / ttfts_s[0] - 1.0),
    }
    for name, counted in (("tbt", "num_in_time"), ("tbt_deposit", "num_in_time_deposit")):
        attained = [
            share((getattr(r, counted), len(r.gaps_s)) for r in side) for side in (ours, theirs)
        ]
        found[name] = attained[0] - attained[1]
    for name, met in (("tpot", "tpot_met"), ("tpot_deposit", "tpot_met_deposit")):
        attained = [
            share((getattr(r, met), 1) for r in side if r.gaps_s) for side in (ours, theirs)
        ]
        found[name] = attained[0] - attained[1]
    return found


def _mean_error(sides: Sequence[Sequence[float]]) -> float:
    """Return the mean of |second - first| / first over pairs."""
    return statistics.fmean(abs(b / a - 1.0) for a, b in zip(*sides, strict=True))


def missed(found: dict[str, float]) -> list[str]:
    """Return the bars that a configuration misses."""
    return [name for name, bar in BARS.items() if abs(found[name]) > bar]
