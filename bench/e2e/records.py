"""What one run leaves behind: enough to compute every figure again."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.e2e.systems import is_slo_blind
from bench.e2e.trace import stated_slos_s
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request at the executor's stream. Seconds on the run's clock."""

    request_id: str
    submitted_s: float
    num_prompt_tokens: int
    generated_s: tuple[float, ...]  # arrival of each token at the stream
    failure: str = ""  # why it ended otherwise than at its length, or when its reader left
    num_output_tokens: int = 0  # that were asked for; 0: as many as came
    leaves_after: int | None = None  # tokens of which its reader goes; None: it stays
    token_ids: tuple[int, ...] = ()
    level: ServiceLevel = NO_SERVICE_LEVEL  # what it stated

    @property
    def read_s(self) -> tuple[float, ...]:
        """Return the arrivals of the tokens that its reader stayed for."""
        return self.generated_s[: self.leaves_after]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The engine at one moment, as `WatchRequests` shows it."""

    time_s: float
    pool_used_frac: float
    offloaded_frac: float  # of the layer groups of all requests
    num_requests: int
    num_held: int  # paused or parked


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """Which run this is."""

    system: str
    seed: int
    slo_scale: float
    readers: str = "paced"  # of `READERS`
    leaving: float = 0.0  # share of the readers that leave
    num_drafts: int = 0  # tokens drafted per request and step
    acceptance: float | None = None  # share of tokens that are drafted right; None: by n-gram

    @property
    def label(self) -> str:
        """Return the system's name in tables."""
        if not self.num_drafts:
            return self.system
        how = "n-gram" if self.acceptance is None else f"{self.acceptance:g} right"
        return f"{self.system}, {self.num_drafts} drafts ({how})"

    @property
    def name(self) -> str:
        readers = "" if self.readers == "paced" else f"-{self.readers}"
        leaving = f"-leaving{self.leaving:g}" if self.leaving else ""
        how = "ngram" if self.acceptance is None else f"{self.acceptance:g}"
        drafts = f"-drafts{self.num_drafts}-{how}" if self.num_drafts else ""
        return f"{self.system}-x{self.slo_scale:g}-s{self.seed}{readers}{leaving}{drafts}"

    @property
    def is_of_all_scales(self) -> bool:
        """Whether the run says what readers of any pace would have had.

        Otherwise it depends on the pace, be it only by when readers leave.
        """
        return is_slo_blind(self.system) and not self.leaving


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One system on one trace."""

    key: RunKey
    slo_s: float  # TBT and TPOT SLO, and the reader's interval, where they are stated as they are
    requests: tuple[RequestRecord, ...]
    samples: tuple[Sample, ...]
    sums: dict[str, float] = field(default_factory=dict)  # of the executor's metrics, over the run
    started: str = ""  # UTC
    load: float = 0.0  # of the machine when the run ended

    @property
    def slos_s(self) -> list[float]:
        """Return what each request stated; 0: nothing."""
        return stated_slos_s(self.key.readers, len(self.requests), self.slo_s)


def save(run: RunRecord, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(run)))


def load(path: Path) -> RunRecord:
    data = json.loads(path.read_text())
    return RunRecord(
        **data
        | {
            "key": RunKey(**data["key"]),
            "requests": requests_of(data["requests"]),
            "samples": tuple(Sample(**s) for s in data["samples"]),
        }
    )


def requests_of(rows: Iterable[Mapping[str, Any]]) -> tuple[RequestRecord, ...]:
    """Return the requests that a file has; what it does not say of them is as by default."""
    made = {"generated_s": tuple, "token_ids": tuple, "level": lambda level: ServiceLevel(**level)}
    return tuple(
        RequestRecord(**row | {name: make(row[name]) for name, make in made.items() if name in row})
        for row in rows
    )


def as_stated(run: RunRecord, slo_scale: float, readers: str) -> RunRecord:
    """Return the run as if others had read, with another multiple of the base SLO."""
    base_s = run.slo_s / run.key.slo_scale
    key = replace(run.key, slo_scale=slo_scale, readers=readers)
    return replace(run, key=key, slo_s=slo_scale * base_s)


def load_all(folder: Path) -> Sequence[RunRecord]:
    return [load(path) for path in sorted(folder.glob("*.json"))]
