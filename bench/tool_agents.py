"""Agents whose every step but the first comes when a tool has answered: simulated, and engine."""

import random
from dataclasses import dataclass

from simulator.sessions import Conversation
from simulator.workload import ArrivingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAgents:
    """Sessions that begin alike, within a tool's longest wait of each other."""

    num_sessions: int = 24
    num_steps: int = 12
    shared_tokens: int = 2_000  # that all begin with
    message_tokens: int = 400  # of the first step behind them, and what a tool answers
    answer_tokens: int = 100
    tool_s: tuple[float, float] = (1.0, 30.0)  # least and most, each as likely

    @property
    def longest_tokens(self) -> int:
        """Return what a session is in the end."""
        own = self.num_steps * (self.message_tokens + self.answer_tokens)
        return self.shared_tokens + own

    @property
    def third_tokens(self) -> int:
        """Return a third of all sessions in the end, each for itself."""
        return self.num_sessions * self.longest_tokens // 3

    @property
    def title(self) -> str:
        own = self.num_steps * (self.message_tokens + self.answer_tokens)
        return (
            f"{self.num_sessions} agents of {self.num_steps} steps, {self.shared_tokens:,} shared "
            f"and up to {own:,} own tokens, tool waits of {self.tool_s[0]:g} to "
            f"{self.tool_s[1]:g} s"
        )

    def steps(self, seed: int) -> list[ArrivingRequest]:
        """Return all steps, one session's after the other's."""
        made = list[ArrivingRequest]()
        for number in range(self.num_sessions):
            rng = random.Random(f"tool agents {seed} {number}")
            agent = Conversation(
                name=f"a{number}",
                num_said=self.shared_tokens,
                branches_off=(("all", self.shared_tokens),),
                begins_s=rng.uniform(0.0, self.tool_s[1]),
            )
            for step in range(self.num_steps):
                made.append(
                    agent.step(
                        f"a{number}.{step}",
                        self.message_tokens,
                        self.answer_tokens,
                        wait_s=rng.uniform(*self.tool_s) if step else 0.0,
                    )
                )
        return made
