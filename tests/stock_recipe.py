"""What stock vLLM's answers depend on, besides the model and what is asked."""

import os
import platform
from importlib.metadata import packages_distributions, version
from pathlib import Path

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


def _processor() -> str:
    """Return what tells processors apart that compute with other instructions."""
    described = Path("/proc/cpuinfo")
    if not described.exists():
        return platform.processor()
    lines = described.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
