"""Policies by name: what each consists of, and the seven that the stack comes with.

A policy has two halves, both functions of a snapshot. Where KV lives is placed by the planner;
which requests run is decided in the engine's process (`services/control/admission.py`). Placement
may pause a request only when nothing else fits, or where the preset says so.

Any other policy is named `module:attribute`, a `Preset` of a module that Python finds.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TypeAlias

from services.placement.admit.layerkv import with_slo_aware_admission
from services.placement.place.all_resident import all_resident
from services.placement.place.layerkv import layerkv
from services.placement.run import evenflow
from services.placement.run.papers import ellm, fcfs, tokenflow
from services.placement.run.types import RunDecision, RunSnapshot
from services.placement.types import Plan, Replan, Snapshot, VictimRule

Rule: TypeAlias = Callable[[Snapshot], Plan]
Run: TypeAlias = Callable[[RunSnapshot], RunDecision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Where KV lives, and when that is asked anew."""

    rule: Rule | None  # None: the planner's solver, request by request
    replan: Replan
    needs: tuple[str, ...] = ()  # fields of a snapshot, beside the required ones


ALL_RESIDENT = Placing(rule=all_resident, replan=Replan.NEVER)
OPTIMISER = Placing(rule=None, replan=Replan.ADAPTIVE, needs=("profile", "h2d"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a policy's name stands for."""

    placing: Placing = ALL_RESIDENT
    run: Run | None = None  # None: vLLM's own order
    recomputes: bool = False  # its decisions have `uncached_blocks`: the engine makes room for them
    has_priorities: bool = False  # whether the urgent come first: else all priorities are 0
    has_shares: bool = False  # whether fairness ids may have: else all requests are alike
    needs_layers: bool = True  # without layer-wise KV there is nothing that it decides
    deposit: bool = False  # whether deposited tokens back a plan
    pause: bool = False  # whether a plan may pause for an SLO
    victim_rule: VictimRule = VictimRule.KV_AND_DEPOSIT
    is_slo_blind: bool = False  # it does the same whatever was promised


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "vllm": Preset(is_slo_blind=True, needs_layers=False),
        # Ours: layers leave only where no reader pays for it, else requests take turns.
        "evenflow": Preset(
            placing=OPTIMISER,
            run=evenflow.decide,
            has_priorities=True,
            has_shares=True,
            needs_layers=False,
        ),
        "orbitflow": Preset(placing=OPTIMISER, pause=True, deposit=True),
        "tokenflow": Preset(run=tokenflow.decide, needs_layers=False),
        "layerkv": Preset(
            placing=Placing(
                rule=layerkv, replan=Replan.EVERY_STEP, needs=("profile", "h2d", "d2h")
            ),
            run=with_slo_aware_admission(fcfs.streams),
        ),
        "ellm": Preset(run=ellm.decide, recomputes=True),
        "fcfs-chunked": Preset(run=fcfs.chunked, needs_layers=False),
    }
)


@cache
def preset_of(policy: str) -> Preset:
    """Return a policy by its name, or by `module:attribute`, whose module is imported.

    Raises ValueError, in one sentence, for a name that stands for none.
    """
    if policy in PRESETS:
        return PRESETS[policy]
    module, _, attribute = policy.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        known = ", ".join(PRESETS)
        raise ValueError(f"policy {policy!r} is neither one of {known} nor module:attribute")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy {policy!r} cannot be loaded: {error}") from error
    if not isinstance(found, Preset):
        raise ValueError(f"policy {policy!r} is a {type(found).__name__}, not a Preset")
    return found


def loadable(policy: str) -> str:
    """Return a policy's name. Raises ValueError as `preset_of` does."""
    preset_of(policy)
    return policy


def resolved(snapshot: Snapshot) -> tuple[Preset, Snapshot]:
    """Return the preset, and the snapshot with nothing left open. The policy can be loaded."""
    given, preset = snapshot.parameters, preset_of(snapshot.policy)
    parameters = replace(
        given,
        deposit=preset.deposit if given.deposit is None else given.deposit,
        pause=preset.pause if given.pause is None else given.pause,
        victim_rule=preset.victim_rule if given.victim_rule is None else given.victim_rule,
    )
    return preset, replace(snapshot, parameters=parameters)
