"""The health probe, run as a container runs it."""

import asyncio
import sys


async def probed(*arguments: str) -> tuple[int | None, str]:
    """Run the probe; return its exit code and what it says."""
    probe = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.kit.probe", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, said = await probe.communicate()
    return probe.returncode, said.decode()
