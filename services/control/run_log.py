"""One JSON line per run decision, with what the policy saw: enough to decide again."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Any

from services.control.options import ControllerOptions
from services.placement.presets import Run
from services.placement.run.papers.ellm import EllmRules
from services.placement.run.papers.tokenflow import TokenflowRules
from services.placement.run.reason import Reason
from services.placement.run.resume import ResumeWay
from services.placement.run.types import (
    RunDecision,
    RunPhase,
    RunRequest,
    RunSnapshot,
    StepCosts,
)
from services.placement.types import EngineShape

RULES: Mapping[str, type[Any]] = {"ellm": EllmRules, "tokenflow": TokenflowRules}


class RunLog:
    """Appends what an engine's policies decide to a file."""

    def __init__(self, options: ControllerOptions) -> None:
        """Take the file and what is written into each line: the policy, and its rules."""
        self._path = Path(options.run_log)
        rules = {name: asdict(getattr(options, name)) for name in RULES}
        self._rules = {"policy": options.policy, **rules}

    def logged(self, policy: Run) -> Run:
        """Return a policy whose decisions are all appended."""

        def decide(snapshot: RunSnapshot) -> RunDecision:
            decision = policy(snapshot)
            self.append(snapshot, decision)
            return decision

        return decide

    def append(self, snapshot: RunSnapshot, decision: RunDecision) -> None:
        seen = asdict(snapshot)
        del seen["_blocks"]
        entry = {**self._rules, "snapshot": seen, "decision": asdict(decision)}
        line = json.dumps(entry, separators=(",", ":"), default=_plain)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(value, key=str)
    raise TypeError(type(value).__name__)


def snapshot_of(entry: Mapping[str, Any]) -> RunSnapshot:
    """Return what the policy saw."""
    seen = dict(entry["snapshot"])
    requests = [
        RunRequest(**one | {"phase": RunPhase(one["phase"])}) for one in seen.pop("requests")
    ]
    engine, costs = EngineShape(**seen.pop("engine")), seen.pop("costs")
    return RunSnapshot(
        requests=tuple(requests),
        engine=engine,
        costs=None if costs is None else StepCosts(**costs),
        **seen,
    )


def decision_of(entry: Mapping[str, Any]) -> RunDecision:
    """Return what it answered."""
    made = dict(entry["decision"])
    ways, reasons = made.pop("ways"), made.pop("reasons", {})
    return replace(
        RunDecision(**made),
        run=tuple(made["run"]),
        park=frozenset(made["park"]),
        ways=None if ways is None else frozenset(map(ResumeWay, ways)),
        reasons={name: Reason(reason) for name, reason in reasons.items()},
    )


def replay(path: Path) -> list[int]:
    """Decide again. Returns the numbers of the lines, from 1, whose decision is another one.

    A policy that a line names as `module:attribute` is imported.
    """
    different = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            entry = json.loads(line)
            rules = {name: kind(**entry[name]) for name, kind in RULES.items()}
            run = ControllerOptions(policy=entry["policy"], **rules).run
            if run is None or run(snapshot_of(entry)) != decision_of(entry):
                different.append(number)
    return different
