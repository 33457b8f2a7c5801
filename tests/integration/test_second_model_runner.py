"""Row edits work in Model Runner V2, as far as that can be run without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("second_model_runner_rows.py")


@pytest.mark.timeout(1_800)
def test_edits_reach_the_rows_that_attention_reads() -> None:
    pytest.importorskip("triton")

    run = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=1_200
    )

    assert run.returncode == 0, run.stderr[-2_000:]
    assert "rows are right" in run.stdout
