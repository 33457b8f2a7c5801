"""The composition root: the one module that puts parts of the services and the simulator together.

The policies are the planner's: the rest of the simulator knows them by their interface only.
"""

from dataclasses import replace

from services.placement.presets import preset_of
from services.placement.types import EngineShape, Plan, Snapshot
from services.planner.policy.orbitflow import OrbitFlow
from services.planner.policy.policies import make_plan
from services.planner.solver.budget import NodeBudget
from services.planner.solver.solver import warm_solver
from simulator import hcache
from simulator.deployment import Deployment
from simulator.device.hardware import Model
from simulator.engine.engine import Brain, Engine
from simulator.engine.machine import Machine
from simulator.engine.planning import PlanningOptions, Policy
from simulator.engine.records import RunRecord
from simulator.engine.simulation import simulate
from simulator.measured import MeasuredDeployment
from simulator.workload import ArrivingRequest

PLAN_NODES = 500  # of one search: some milliseconds
OFFLOADING_PRESET = "lab.policies.presets:VLLM_OFFLOADING"


_optimiser = OrbitFlow(warm_solver)


def stack_policy(num_nodes: int = PLAN_NODES) -> Policy:
    """Return the planner's policies, each search limited to so many nodes."""

    def plan(snapshot: Snapshot) -> Plan:
        return make_plan(snapshot, NodeBudget(num_nodes), _optimiser)

    return plan


def make_engine(
    shape: EngineShape, machine: Machine, options: PlanningOptions, *, seed: int = 0
) -> Engine:
    """Return an engine with a policy. Raises ValueError as `preset_of` does."""
    if options.policy == OFFLOADING_PRESET:
        vllm = replace(options.vllm, offloading_connector=True, offload_prompt_only=False)
        options = replace(options, vllm=vllm)
    brain = Brain(options=options, policy=stack_policy())
    return Engine(shape, machine, brain, offloads=options.uses_host, seed=seed)


def check(deployment: Deployment | MeasuredDeployment, policy: str) -> None:
    """Raise ValueError as `preset_of` does, and for what a policy knows nothing of.

    `hcache` projects what the named models have, and a measured engine says nothing of that. A
    policy that recomputes KV in every step would have to recompute windows and states, too.
    """
    preset = preset_of(policy)
    named = isinstance(deployment, Deployment) and isinstance(deployment.model, Model)
    if policy == hcache.PRESET and not named:
        raise ValueError(
            f"{policy} needs a model and a device of a name here: it knows their projections"
        )
    if preset.recomputes and deployment.shape().side_windows:
        raise ValueError(f"{policy} recomputes KV: it does not work with windows or states")
    if policy == OFFLOADING_PRESET and deployment.shape().side_windows:
        raise ValueError(f"{policy} is not simulated for models with windows or states")
    if preset.recomputes and deployment.shape().max_ahead_tokens:
        raise ValueError(f"{policy} recomputes KV: it does not work with drafts")


def run_policy(
    deployment: Deployment | MeasuredDeployment,
    requests: list[ArrivingRequest],
    options: PlanningOptions,
    *,
    seed: int = 0,
) -> RunRecord:
    """Return what one policy does with a workload. Raises what `check` raises."""
    check(deployment, options.policy)
    machine = deployment.machine()
    if options.policy == hcache.PRESET and isinstance(deployment, Deployment):
        machine = replace(machine, way_back=hcache.way_back(deployment))
    engine = make_engine(deployment.shape(), machine, options, seed=seed)
    return simulate(engine, requests)
