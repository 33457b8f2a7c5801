"""What may be changed of the run policy `evenflow`.

Seconds in hand are before the way back: where a rule weighs a request that must be loaded, the time
of its load, and of the link's queue, comes on top.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenflowRules:
    """What may be changed. The defaults are those of `docs/who-runs.md`."""

    tight_frac: float = 0.95  # of a reader's interval that a step with offloaded layers may take
    hide_frac: float = 1.05  # of its compute that a step takes at most where no rate is stated
    growth_tokens: int = 48  # by which all have grown when a newcomer's step is judged
    due_s: float = 0.75  # in hand, at which a parked reader must be on its way back
    most_prompts: int = 2  # of newcomers that readers make room for, computed at a time
    margin_s: float = 0.5  # that a victim has more in hand than the one it makes room for
    period_s: float = 0.25  # between decisions; shortest turn
    blocked_s: float = 0.05  # between decisions while a reader is due and finds no room
    safety_s: float = 0.004  # before the next token is due
    floor_frac: float = 0.25  # of a decode step: less time left is not worth a piece of a prompt
    min_chunk: int = 8
    max_chunk: int = 512  # while a request waits for room that slow readers could not make
    slow_frac: float = 0.33  # of the time that readers must run, up to which they are slow
    unsaved_blocks: int = 3  # of a victim's newest that need no copy yet
    aside_patience_s: float = 60.0  # after which one that is larger than the pool gets a turn
    aside_turn_s: float = 6.0
    aside_leave_s: float = 1.0  # the first turn ends so soon when others come
    raised_after_s: float = 60.0  # of waiting, one request at a time is as urgent as any
    raised_turn_s: float = 6.0  # and stays so for as long once it runs


DEFAULT_RULES = EvenflowRules()
