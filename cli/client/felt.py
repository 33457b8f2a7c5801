"""What readers felt of their answers, from when each token reached them. Pure.

Times are seconds on one clock.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from services.pacing.deposit import release_interval_s
from services.pacing.reading import REBUFFERING, Reading, reading_of
from services.pacing.types import ServiceLevel

ALL = "all"
UNPACED = "unpaced"
DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {
        "ttft": "sending to the first token of any kind, thoughts included",
        "ttfat": "sending to the first token of the answer; pace is judged from there on",
        "ttft_in_time_frac": "share of those promised a TTFT whose answer began within it",
        "interval": "S = 1 / reading rate, else the TBT SLO, else the TPOT SLO, else no promise",
        "late": "came more than tolerance_s after S past the turn of the token before",
        "in_time_frac": "share of the tokens after the first that were not late",
        "waited": "seconds that late tokens came after their turn, per reader",
        "rebuffering_frac": REBUFFERING,
        "tokens_per_s": "delivered, from a reader's first token to the last, over all readers",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTokens:
    """When the tokens of an answer came, at least one."""

    sent_s: float
    arrived_s: tuple[float, ...]  # one per token, ascending
    num_thoughts: int = 0  # of these tokens, before the first of the answer

    @property
    def ttft_s(self) -> float:
        return self.arrived_s[0] - self.sent_s

    @property
    def read_s(self) -> tuple[float, ...]:
        """When each token of the answer itself came; thoughts have no pace."""
        return self.arrived_s[self.num_thoughts :]

    @property
    def ttfat_s(self) -> float | None:
        """Time to the first token of the answer; None: nothing but thoughts came."""
        return self.read_s[0] - self.sent_s if self.read_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard(TimedTokens):
    """One answer as its reader got it."""

    level: ServiceLevel  # what the reader was promised
    num_tokens: int  # as the server counted; more than arrived: some were told with another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Felt:
    """What some readers felt together. None: not promised, or too few tokens to say."""

    readers: str  # their reading rate in tokens/s, "unpaced", or "all"
    num_requests: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    num_thoughts: int  # tokens
    ttfat_p50_s: float | None  # of answers that have begun; None: none has
    ttfat_p95_s: float | None
    ttft_in_time_frac: float | None
    in_time_frac: float | None
    num_stalls: int | None  # late tokens
    waited_p50_s: float | None  # per reader
    waited_p95_s: float | None
    waited_max_s: float | None
    rebuffering_frac: float | None
    tokens_per_s: float | None


def felt_by_rate(heard: Sequence[Heard]) -> list[Felt]:
    """Return a row for each reading rate, slowest first, and one for all; none without answers."""
    if not heard:
        return []
    rates = {one.level.consumption_rate_tps for one in heard}
    if len(rates) == 1:
        return [felt(_name(*rates), heard)]
    ordered = sorted(rates, key=lambda rate: math.inf if rate is None else rate)
    return [
        *(
            felt(_name(rate), [one for one in heard if one.level.consumption_rate_tps == rate])
            for rate in ordered
        ),
        felt(ALL, heard),
    ]


def felt(readers: str, heard: Sequence[Heard]) -> Felt:
    """Return what these readers felt; there is at least one."""
    ttft_s = [one.ttft_s for one in heard]
    begun = [one for one in heard if one.read_s]
    ttfat_s = [one.ttfat_s for one in heard if one.ttfat_s is not None]
    promised = [one for one in heard if one.level.slo_ttft_s is not None]
    found = [
        reading_of(one.read_s, release_interval_s(one.level))
        for one in begun
        if release_interval_s(one.level)
    ]
    waited_s = [one.waited_s for one in found]
    delivering_s = sum(one.read_s[-1] - one.read_s[0] for one in begun)
    return Felt(
        readers=readers,
        num_requests=len(heard),
        ttft_p50_s=percentile(ttft_s, 0.50),
        ttft_p95_s=percentile(ttft_s, 0.95),
        ttft_p99_s=percentile(ttft_s, 0.99),
        num_thoughts=sum(one.num_thoughts for one in heard),
        ttfat_p50_s=percentile(ttfat_s, 0.50) if begun else None,
        ttfat_p95_s=percentile(ttfat_s, 0.95) if begun else None,
        ttft_in_time_frac=_share(map(_is_in_time, promised), len(promised)),
        in_time_frac=_share((one.num_gaps - one.num_late for one in found), _gaps(found)),
        num_stalls=sum(one.num_late for one in found) if found else None,
        waited_p50_s=percentile(waited_s, 0.50) if found else None,
        waited_p95_s=percentile(waited_s, 0.95) if found else None,
        waited_max_s=max(waited_s, default=None),
        rebuffering_frac=_share(waited_s, sum(one.reading_s for one in found)),
        tokens_per_s=_share((len(one.read_s) - 1 for one in begun), delivering_s),
    )


def percentile(values: Iterable[float], frac: float) -> float:
    """Return the value below which `frac` in [0, 1] of at least one lie, interpolated linearly."""
    ordered = sorted(values)
    place = frac * (len(ordered) - 1)
    low = ordered[math.floor(place)]
    return low + (ordered[math.ceil(place)] - low) * (place - math.floor(place))


def num_untimed(heard: Sequence[Heard]) -> int:
    """Return how many tokens the servers counted that no event told of."""
    return sum(max(0, one.num_tokens - len(one.arrived_s)) for one in heard)


def _name(rate_tps: float | None) -> str:
    return UNPACED if rate_tps is None else f"{rate_tps:g}"


def _is_in_time(one: Heard) -> bool:
    slo_s, ttfat_s = one.level.slo_ttft_s, one.ttfat_s
    return slo_s is not None and ttfat_s is not None and ttfat_s <= slo_s


def _gaps(found: Sequence[Reading]) -> int:
    return sum(one.num_gaps for one in found)


def _share(parts: Iterable[float], whole: float) -> float | None:
    return sum(parts) / whole if whole else None
