"""Stock vLLM's answers: how they are made, and what they depend on besides model and question."""

import os
import platform
import subprocess
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

from lab.stack.processes import ENGINE_ENVIRONMENT, PYTHON_PATH, ROOT

TIMEOUT_S = 1_800.0

# What may choose other kernels, and so other last digits.
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "OMP_NUM_THREADS")


def stock_recipe() -> list[str]:
    """Return parts of a fingerprint: the versions of the libraries, and the processor."""
    distributions = packages_distributions()
    return [
        *(f"{module} {version(distributions[module][0])}" for module in ("vllm", "torch")),
        *(f"{variable} {os.environ.get(variable)}" for variable in VARIABLES),
        _processor(),
    ]


def run_apart(module: str, *arguments: str) -> None:
    """Run a module in a process of its own: nothing of a stock engine is left in this one."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | ENGINE_ENVIRONMENT | {"PYTHONPATH": PYTHON_PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-4_000:]


def _processor() -> str:
    """Return what tells processors apart that compute with other instructions."""
    described = Path("/proc/cpuinfo")
    if not described.exists():
        return platform.processor()
    lines = described.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
