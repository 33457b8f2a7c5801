"""The gateway starts without the engine's packages."""

import subprocess
import sys


def test_the_gateway_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, services.gateway.app\n"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )

    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        timeout=600,
    )

    assert result.stdout.strip() == "[]"
