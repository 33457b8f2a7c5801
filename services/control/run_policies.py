"""Who decides who runs: the policies by name."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from services.placement.admit.layerkv import with_slo_aware_admission
from services.placement.presets import AdmissionPolicy, RunPolicy
from services.placement.run import evenflow, joint
from services.placement.run.papers import andes, fcfs, layerkv_park, tokenflow
from services.placement.run.papers.ellm import EllmRules
from services.placement.run.papers.ellm import decide as decide_ellm
from services.placement.run.types import RunDecision, RunSnapshot

Policy: TypeAlias = Callable[[RunSnapshot], RunDecision]

POLICIES: Mapping[RunPolicy, Policy] = {
    RunPolicy.EVENFLOW: evenflow.decide,
    RunPolicy.JOINT: joint.decide,
    RunPolicy.TOKENFLOW: tokenflow.decide,
    RunPolicy.ANDES: andes.decide,
    RunPolicy.LAYERKV_PARK: layerkv_park.decide,
    RunPolicy.FCFS_CHUNKED: fcfs.chunked,
    RunPolicy.FCFS_RESERVED: fcfs.sglang,
    RunPolicy.FCFS_RECOMPUTE: fcfs.recompute,
    RunPolicy.FCFS_SWAP: fcfs.swap,
    RunPolicy.SRTF: fcfs.shortest_first,
}


def policy_of(
    run: RunPolicy,
    admission: AdmissionPolicy,
    *,
    ellm: EllmRules,
    policies: Mapping[RunPolicy, Policy] = POLICIES,
) -> Policy | None:
    """Return who decides on these two axes; None for vLLM's own order."""
    policy = policies.get(run)
    if run is RunPolicy.ELLM:
        policy = partial(decide_ellm, rules=ellm)
    if admission is AdmissionPolicy.SLO_AWARE:
        return with_slo_aware_admission(policy or fcfs.streams)
    return policy
