"""The health probe, run as a container runs it."""

import asyncio
import sys

PATIENT = ("--timeout", "60")


async def probed(*arguments: str) -> tuple[int | None, str]:
    """Run the probe; return its exit code and what it says."""
    command = [sys.executable, "-m", "services.kit.probe", *PATIENT, *arguments]
    probe = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await probe.communicate()
    return probe.returncode, said.decode()
