"""The composition root: the one module that puts parts of the services and the simulator together.

The policies are the planner's; the online profile and the length predictor are the executor's: the
same objects as in the stack. The rest of the simulator knows them by their interfaces only.
"""

from services.control.answer_lengths import AnswerLengths
from services.control.profile import OnlineProfile
from services.control.rates import Rates
from services.control.types import StepSample
from services.placement.presets import PRESETS, PlacementPolicy
from services.placement.types import EngineShape, Plan, Profile, Snapshot
from services.planner.policy.orbitflow import OrbitFlow
from services.planner.policy.policies import make_plan
from services.planner.solver.budget import NodeBudget
from services.planner.solver.solver import warm_solver
from simulator.deployment import Deployment
from simulator.engine import Brain, Engine, Machine
from simulator.learner import MeasuredStep
from simulator.measured import MeasuredDeployment
from simulator.planning import PlanningOptions, Policy
from simulator.records import RunRecord
from simulator.simulation import simulate
from simulator.workload import ArrivingRequest

PLAN_NODES = 500  # of one search: some milliseconds


class StackLearner:
    """The executor's profile and length predictor."""

    def __init__(self, shape: EngineShape) -> None:
        self._profile = OnlineProfile(
            num_layers=shape.num_layers, num_parameters=shape.model.num_parameters
        )
        self._lengths = AnswerLengths()
        self._rates = Rates(shape.block_bytes)

    def add(self, step: MeasuredStep) -> None:
        self._rates.note_step(
            step.step_s, num_tokens=step.num_tokens, num_prefill_tokens=step.num_prefill_tokens
        )
        self._profile.add(
            StepSample(
                step_s=step.step_s,
                layer_s=step.layer_s,
                stall_s=step.stall_s,
                num_tokens=step.num_tokens,
                num_context_tokens=step.num_context_tokens,
                num_prefill_tokens=step.num_prefill_tokens,
                num_output_tokens=step.num_output_tokens,
            )
        )

    def profile(self) -> Profile | None:
        return self._profile.profile()

    def pace(self) -> tuple[float | None, float | None]:
        return self._rates.step_s.value, self._rates.prefill_tokens_per_s.value

    def answer_ended(self, num_output_tokens: int) -> None:
        self._lengths.ended(num_output_tokens)

    def predict_output(self, num_output_tokens: int, max_tokens: int) -> tuple[int, int] | None:
        return self._lengths.predict(num_output_tokens=num_output_tokens, max_tokens=max_tokens)


_optimiser = OrbitFlow(warm_solver)


def stack_policy(num_nodes: int = PLAN_NODES) -> Policy:
    """Return the planner's policies, each search limited to so many nodes."""

    def plan(snapshot: Snapshot) -> Plan:
        return make_plan(snapshot, NodeBudget(num_nodes), _optimiser)

    return plan


def make_engine(
    shape: EngineShape, machine: Machine, options: PlanningOptions, *, seed: int = 0
) -> Engine:
    """Return an engine with the stack's policies. Raises KeyError for an unknown policy."""
    assert options.policy in PRESETS
    return Engine(
        shape,
        machine,
        Brain(options=options, policy=stack_policy(), learner=StackLearner(shape)),
        offloads=options.placement_policy is not PlacementPolicy.ALL_RESIDENT,
        seed=seed,
    )


def run_policy(
    deployment: Deployment | MeasuredDeployment,
    requests: list[ArrivingRequest],
    options: PlanningOptions,
    *,
    seed: int = 0,
) -> RunRecord:
    """Return what one policy does with a workload."""
    engine = make_engine(deployment.shape(), deployment.machine(), options, seed=seed)
    return simulate(engine, requests)
