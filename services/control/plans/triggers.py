"""Which triggers a policy listens to."""

from services.control.types import Trigger
from services.placement.presets import REPLAN, Replan, with_axes
from services.placement.types import PolicyParameters

# Who runs has changed, or what those who run do.
OF_THE_BATCH = frozenset(
    {Trigger.ADMITTED, Trigger.PREFILLED, Trigger.PREEMPTED, Trigger.FINISHED, Trigger.ABORTED}
)
NOT_OF_THE_BATCH = frozenset({Trigger.WINDOW_END, Trigger.MISMATCH})


def replan_of(policy: str, parameters: PolicyParameters) -> Replan:
    """Return when a preset, with its placement axis possibly replaced, wants to be asked."""
    return REPLAN[with_axes(policy, parameters).placement]


def asks(trigger: Trigger, replan: Replan) -> bool:
    """Return whether a policy wants to be asked for this reason."""
    if replan is Replan.NEVER:
        return False
    return replan is not Replan.BATCH_CHANGE or trigger not in NOT_OF_THE_BATCH
