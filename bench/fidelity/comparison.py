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
    "simulated": "of all seeds of the noise together",
    "pauses": "simulated, mean of the seeds, with the warm-up before the run / of the run",
    "()": "runs of the seed that also calibrates; all others are held out",
}


def errors(real: RunRecord, simulated: Sequence[RunRecord]) -> dict[str, float]:
    """Return the errors of one configuration, of the simulations all together.

    All runs have the same requests, in one order.
    """
    theirs = [request_figures(request, real.slo_s) for request in real.requests]
    ours = [[request_figures(r, real.slo_s) for r in run.requests] for run in simulated]
    sides = (theirs, [request for run in ours for request in run])
    gaps_s = [sorted(gap for request in side for gap in request.gaps_s) for side in sides]
    ttfts_s = [statistics.fmean(request.ttft_s for request in side) for side in sides]
    tpots_s = [
        [
            statistics.fmean(gap for one in same for gap in one.gaps_s)
            for same in requests
            if same[0].gaps_s
        ]
        for requests in (zip(theirs, strict=True), zip(*ours, strict=True))
    ]
    found = {
        "step": _mean_error([[quantile(gaps, q) for q in QUANTILES] for gaps in gaps_s]),
        "mean_step": statistics.fmean(gaps_s[1]) / statistics.fmean(gaps_s[0]) - 1.0,
        "request_tpot": _mean_error(tpots_s),
        "ttft": abs(ttfts_s[1] / ttfts_s[0] - 1.0),
    }
    for name, counted in (("tbt", "num_in_time"), ("tbt_deposit", "num_in_time_deposit")):
        attained = [share((getattr(r, counted), len(r.gaps_s)) for r in side) for side in sides]
        found[name] = attained[1] - attained[0]
    for name, met in (("tpot", "tpot_met"), ("tpot_deposit", "tpot_met_deposit")):
        attained = [share((getattr(r, met), 1) for r in side if r.gaps_s) for side in sides]
        found[name] = attained[1] - attained[0]
    return found


def _mean_error(sides: Sequence[Sequence[float]]) -> float:
    """Return the mean of |second - first| / first over pairs."""
    return statistics.fmean(abs(b / a - 1.0) for a, b in zip(*sides, strict=True))


def missed(found: dict[str, float]) -> list[str]:
    """Return the bars that a configuration misses."""
    return [name for name, bar in BARS.items() if abs(found[name]) > bar]
