"""Executors without engines that die, leave, and are cut off."""

import asyncio
import random

from lab.stack.link_proxy import LinkProxy
from tests.machine import Machine

LINK_STALL_S, BEAT_S = 2.0, 0.25
OVERLAP_TOKENS = 4  # that a moved answer's next executor generates again: a difference is an error


class Failing:
    """One executor, and the link to it."""

    def __init__(self, number: int) -> None:
        self.machine = Machine(number)
        self.machine.interval_s = 0.002
        self.link = LinkProxy(self.machine.address)

    async def beat(self) -> None:
        """Say once in a while how many steps there were, as engines do."""
        for step in range(1, 1 << 30):
            session = self.machine.session
            if session is not None:
                session.num_steps = step
                session.send()
            await asyncio.sleep(BEAT_S)

    async def die(self, rng: random.Random) -> None:
        await self.machine.kill()
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        await self.machine.start()

    async def leave(self, rng: random.Random) -> None:
        session = self.machine.session
        if session is not None:
            session.is_leaving = True
            session.send()
            await asyncio.sleep(rng.uniform(0.05, 0.3))
        await self.die(rng)

    async def be_cut_off(self, rng: random.Random) -> None:
        self.link.cut()

    async def be_silent(self, rng: random.Random) -> None:
        with self.link.silent():
            await asyncio.sleep(LINK_STALL_S + rng.uniform(-0.5, 1.5))

    async def be_slow(self, rng: random.Random) -> None:
        with self.link.slow(rng.uniform(0.02, 0.3)):
            await asyncio.sleep(rng.uniform(0.5, 2.0))
