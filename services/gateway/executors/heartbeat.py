"""Whether an executor lives, as its frames tell. No I/O."""

from dataclasses import dataclass

from services.gateway.errors import EngineStalledError, LinkStalledError

CHECK_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """How long an executor may be silent that says how many steps its engine has made."""

    link_s: float = 3.0  # without a frame, of which one a second is promised, > 0
    engine_s: float = 60.0  # without a step, while readers wait for tokens, > 0


class Heartbeat:
    """Looked at every `CHECK_INTERVAL_S`. The time by which a look comes late, if it is as much
    again, does not count: what the executor sent in it may not have been read yet.
    """

    def __init__(self, limits: StallLimits, now_s: float) -> None:
        self._limits = limits
        self._num_steps: int | None = None  # None: it tells none, and promises nothing
        self._frame_s = now_s  # of the newest frame, or since when one is due
        self._step_s = now_s  # of the newest step, or since when one is due
        self._checked_s = now_s

    def took(self, num_steps: int | None, now_s: float) -> None:
        """Take in that a frame came, and how many steps the engine had ended, if that was told."""
        self._frame_s = now_s
        if num_steps != self._num_steps:
            self._num_steps, self._step_s = num_steps, now_s

    def fault(self, now_s: float, *, is_live: bool, is_waited_for: bool) -> LinkStalledError | None:
        """Return what is wrong, if anything is. `is_live`: the executor has requests of this
        gateway; `is_waited_for`: a reader waits for one of them.
        """
        late_s = now_s - self._checked_s - CHECK_INTERVAL_S
        self._checked_s = now_s
        if late_s <= CHECK_INTERVAL_S:
            late_s = 0.0
        self._frame_s = min(now_s, self._frame_s + late_s) if is_live else now_s
        self._step_s = min(now_s, self._step_s + late_s) if is_waited_for else now_s
        if self._num_steps is None:
            return None
        if now_s - self._frame_s > self._limits.link_s:
            return LinkStalledError(f"no message came for {self._limits.link_s:g} s")
        if now_s - self._step_s > self._limits.engine_s:
            return EngineStalledError(f"its engine made no step for {self._limits.engine_s:g} s")
        return None
