"""What processes have written."""

import json
from typing import Any


def log_lines(text: str) -> list[dict[str, Any]]:
    """Return the log lines of a process' output; what else is in it is left out."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
