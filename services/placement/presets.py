"""Policies by name: four axes, and presets of them.

Admission limits how many newcomers the run policy may take in, placement may only remove (pause)
when nothing else fits, and `deposit` says whether deposited tokens back a plan. The planner decides
the placement axis, the engine's process the other two (`services/control/admission.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from services.placement.types import PolicyParameters, Snapshot, VictimRule


class PlacementPolicy(Enum):
    ALL_RESIDENT = "all-resident"
    OPTIMISER = "optimiser"  # per request, by the solver
    BATCH_UNIFORM = "batch-uniform"
    DEEPSPEED = "deepspeed"
    FLEXGEN = "flexgen"
    FLEXGEN_PLUS = "flexgen-plus"
    SLO_AWARE = "slo-aware"
    DYNAMIC_HEURISTIC = "dynamic-heuristic"
    LAYERKV = "layerkv"


class Replan(Enum):
    """When the executor asks for a new plan, beside its expiry."""

    NEVER = "never"  # there is nothing to decide
    BATCH_CHANGE = "batch-change"  # a request joins or leaves
    EVERY_STEP = "every-step"
    ADAPTIVE = "adaptive"  # batch change, end of the window, steps unlike the predicted ones


class RunPolicy(Enum):
    FCFS = "fcfs"  # vLLM's own: nobody is asked
    EVENFLOW = "evenflow"
    JOINT = "joint"
    TOKENFLOW = "tokenflow"
    ANDES = "andes"
    LAYERKV_PARK = "layerkv-park"
    FCFS_CHUNKED = "fcfs-chunked"
    FCFS_RESERVED = "fcfs-reserved"  # SGLang's
    FCFS_RECOMPUTE = "fcfs-recompute"
    FCFS_SWAP = "fcfs-swap"
    SRTF = "srtf"
    ELLM = "ellm"


class AdmissionPolicy(Enum):
    FCFS = "fcfs"
    SLO_AWARE = "slo-aware"  # LayerKV's Algorithm 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a policy name stands for."""

    placement: PlacementPolicy
    run: RunPolicy = RunPolicy.FCFS
    admission: AdmissionPolicy = AdmissionPolicy.FCFS
    deposit: bool = False
    pause: bool = False
    victim_rule: VictimRule = VictimRule.KV_AND_DEPOSIT


REPLAN: Mapping[PlacementPolicy, Replan] = MappingProxyType(
    {
        PlacementPolicy.ALL_RESIDENT: Replan.NEVER,
        PlacementPolicy.OPTIMISER: Replan.ADAPTIVE,
        PlacementPolicy.BATCH_UNIFORM: Replan.ADAPTIVE,
        PlacementPolicy.DEEPSPEED: Replan.BATCH_CHANGE,
        PlacementPolicy.FLEXGEN: Replan.BATCH_CHANGE,
        PlacementPolicy.FLEXGEN_PLUS: Replan.BATCH_CHANGE,
        PlacementPolicy.SLO_AWARE: Replan.BATCH_CHANGE,
        PlacementPolicy.DYNAMIC_HEURISTIC: Replan.EVERY_STEP,
        PlacementPolicy.LAYERKV: Replan.EVERY_STEP,
    }
)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "vllm": Preset(placement=PlacementPolicy.ALL_RESIDENT),
        "deepspeed": Preset(placement=PlacementPolicy.DEEPSPEED),
        "flexgen": Preset(placement=PlacementPolicy.FLEXGEN),
        "flexgen-plus": Preset(placement=PlacementPolicy.FLEXGEN_PLUS),
        "slo-aware": Preset(placement=PlacementPolicy.SLO_AWARE),
        "dynamic-heuristic": Preset(placement=PlacementPolicy.DYNAMIC_HEURISTIC),
        "layerkv": Preset(placement=PlacementPolicy.LAYERKV, admission=AdmissionPolicy.SLO_AWARE),
        # Ours: layers leave only where nobody pays for it, else requests take turns.
        "evenflow": Preset(placement=PlacementPolicy.OPTIMISER, run=RunPolicy.EVENFLOW),
        "tokenflow": Preset(placement=PlacementPolicy.ALL_RESIDENT, run=RunPolicy.TOKENFLOW),
        "andes": Preset(placement=PlacementPolicy.ALL_RESIDENT, run=RunPolicy.ANDES),
        "layerkv-park": Preset(
            placement=PlacementPolicy.ALL_RESIDENT,
            run=RunPolicy.LAYERKV_PARK,
            admission=AdmissionPolicy.SLO_AWARE,
        ),
        "fcfs-chunked": Preset(placement=PlacementPolicy.ALL_RESIDENT, run=RunPolicy.FCFS_CHUNKED),
        "sglang": Preset(placement=PlacementPolicy.ALL_RESIDENT, run=RunPolicy.FCFS_RESERVED),
        "vllm-recompute": Preset(
            placement=PlacementPolicy.ALL_RESIDENT, run=RunPolicy.FCFS_RECOMPUTE
        ),
        "vllm-swap": Preset(placement=PlacementPolicy.ALL_RESIDENT, run=RunPolicy.FCFS_SWAP),
        # On the host, who gave way has hidden states instead of KV.
        "hcache": Preset(placement=PlacementPolicy.ALL_RESIDENT, run=RunPolicy.FCFS_SWAP),
        "ellm": Preset(placement=PlacementPolicy.ALL_RESIDENT, run=RunPolicy.ELLM),
        # OrbitFlow and its ablations (Fig. 14a): each adds one component to the one before.
        "batch-uniform": Preset(placement=PlacementPolicy.BATCH_UNIFORM),
        "request-wise": Preset(placement=PlacementPolicy.OPTIMISER),
        "request-wise-pause": Preset(placement=PlacementPolicy.OPTIMISER, pause=True),
        "orbitflow": Preset(placement=PlacementPolicy.OPTIMISER, pause=True, deposit=True),
        # The optimiser places whoever runs; sets that could run are compared, and it pauses nobody.
        "joint": Preset(placement=PlacementPolicy.OPTIMISER, run=RunPolicy.JOINT, deposit=True),
    }
)


# What they do is the same whatever was promised.
SLO_BLIND = frozenset({"vllm", "deepspeed", "flexgen", "flexgen-plus", "dynamic-heuristic"})
SIMULATED_ONLY = frozenset({"hcache"})  # the engine has no such KV
ENGINE_PRESETS = tuple(name for name in PRESETS if name not in SIMULATED_ONLY)


def with_axes(policy: str, given: PolicyParameters) -> Preset:
    """Return a known preset with the known axis policies that are given in place of its own.

    Where a run policy decides more than the order, no plan pauses anybody for an SLO.
    """
    preset = PRESETS[policy]
    if given.placement_policy:
        preset = replace(preset, placement=PlacementPolicy(given.placement_policy))
    if given.run_policy:
        run = RunPolicy(given.run_policy)
        orders = run in (RunPolicy.FCFS, RunPolicy.SRTF)
        preset = replace(preset, run=run, pause=preset.pause and orders)
    if given.admission_policy:
        preset = replace(preset, admission=AdmissionPolicy(given.admission_policy))
    return preset


def resolved(snapshot: Snapshot) -> tuple[Preset, Snapshot]:
    """Return the preset with the snapshot's own choices, and the snapshot with nothing left open.

    The snapshot names a known preset and known axis policies.
    """
    given, preset = snapshot.parameters, with_axes(snapshot.policy, snapshot.parameters)
    parameters = replace(
        given,
        deposit=preset.deposit if given.deposit is None else given.deposit,
        pause=preset.pause if given.pause is None else given.pause,
        victim_rule=preset.victim_rule if given.victim_rule is None else given.victim_rule,
    )
    return preset, replace(snapshot, parameters=parameters)
