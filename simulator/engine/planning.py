"""What decides in a simulation, and how late its plans come."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from services.control.options import ControllerOptions
from services.control.plans.planner import PlanAnswer
from services.placement.presets import ALL_RESIDENT, preset_of
from services.placement.run.papers.ellm import EllmRules
from services.placement.run.papers.tokenflow import TokenflowRules
from services.placement.types import Plan, PolicyParameters, Snapshot
from simulator.engine.events import PlanCame
from simulator.engine.vllm import VllmOptions

Policy: TypeAlias = Callable[[Snapshot], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """What decides, and how late."""

    policy: str  # see `services.placement.presets.preset_of`
    parameters: PolicyParameters = field(default_factory=PolicyParameters)
    tokenflow: TokenflowRules = field(default_factory=TokenflowRules)
    ellm: EllmRules = field(default_factory=EllmRules)
    seed: int = 0
    plan_latency_s: float = 0.005  # from the snapshot to the plan, >= 0
    report_interval_s: float = 0.0  # of what readers have, see `reader_reports`; 0: known at once
    # Requests begin with what others have: in the pool, and on the host where KV leaves the pool.
    prefix_caching: bool = True
    vllm: VllmOptions = field(default_factory=VllmOptions)
    run_log: str = ""  # file that each run decision is appended to; empty: none
    # Of what fairness ids have attained, under policies that know shares; 0: they have none.
    fairness_half_life_s: float = 0.0
    mismatch_frac: float = 0.15  # of the predicted step that a measured one may differ; 0: any

    @property
    def uses_host(self) -> bool:
        """Whether KV may leave the pool: layers of requests that run, or whole ones that wait."""
        preset = preset_of(self.policy)
        return preset.run is not None or preset.placing is not ALL_RESIDENT

    @property
    def shares_in_pool(self) -> bool:
        """Whether live requests may have what they begin with once: it must be kept."""
        return self.prefix_caching and not preset_of(self.policy).recomputes

    @property
    def controller(self) -> ControllerOptions:
        return ControllerOptions(
            policy=self.policy,
            parameters=self.parameters,
            seed=self.seed,
            mismatch_frac=self.mismatch_frac,
            ellm=self.ellm,
            tokenflow=self.tokenflow,
            run_log=self.run_log,
            fairness_half_life_s=self.fairness_half_life_s
            if preset_of(self.policy).has_shares
            else 0.0,
        )


class LatePlanner:
    """`Planner` in virtual time: each answer comes a fixed time after its question was taken up.

    As behind the executor's client one question is under way, and the newest other one waits.
    """

    def __init__(self, policy: Policy, latency_s: float, now_s: Callable[[], float]) -> None:
        self._policy, self._latency_s, self._now_s = policy, latency_s, now_s
        self._waiting: Snapshot | None = None
        self._under_way: Snapshot | None = None
        self._answers: deque[PlanAnswer] = deque()
        self._due: list[PlanCame] = []  # not yet taken

    def post(self, snapshot: Snapshot) -> bool:
        dropped = self._waiting is not None
        self._waiting = snapshot
        self._begin()
        return dropped

    def _begin(self) -> None:
        if self._under_way is None and self._waiting is not None:
            self._under_way, self._waiting = self._waiting, None
            self._due.append(PlanCame(time_s=self._now_s() + self._latency_s))

    def take_due(self) -> list[PlanCame]:
        """Return the events at which `came` must be called, each once."""
        due, self._due = self._due, []
        return due

    def came(self) -> None:
        """Answer the question under way."""
        snapshot, self._under_way = self._under_way, None
        assert snapshot is not None
        self._answers.append(PlanAnswer(epoch=snapshot.epoch, plan=self._policy(snapshot)))
        self._begin()

    def take(self) -> PlanAnswer | None:
        return self._answers.popleft() if self._answers else None

    def close(self) -> None:
        self._waiting = None
