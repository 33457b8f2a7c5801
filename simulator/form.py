"""`evenflow size` for another program: options as JSON on stdin, an answer as JSON on stdout.

Started as `python -m simulator.form NICENESS`, so that whatever serves beside it goes first.

Asked with `{"options": {"context": 8000, ...}, "config": {...} or null, "served": ["/a"]}`, it
answers `{"said": [["room", "..."], ...]}`, the sentences that the command prints, or
`{"error": "...", "field": "context"}`, the field empty where no single one is at fault. What is
asked comes from a network: a model is a name of ours, one that is served here, or a config; a
policy is a preset. No path, hub id, or module of the asker's is read.
"""

import contextlib
import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer

from services.placement.presets import PRESETS
from simulator.cli import app
from simulator.device.hardware import model_names

OPTIONS = frozenset(
    {"model", "device", "context", "answer", "policy", "reading_rate", "attainment", "ttft_s"}
    | {"questions", "max_readers", "gpus", "pool_tokens", "host_gb", "link"}
)
MAX_MEMORY_BYTES = 4 << 30  # address space: a config may claim any size
MAX_CPU_S = 300  # for a search that nothing waits for any more
CONFIG = "config.json"


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what `evenflow size` says, or what it does not accept and of which field."""
    options = {name: told for name, told in asked["options"].items() if told not in (None, "")}
    if refused := _refused(options, asked):
        return refused
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "answer.json"
        if asked["config"] is not None:
            (Path(folder) / CONFIG).write_text(json.dumps(asked["config"]))
            options["model"] = str(Path(folder) / CONFIG)
        arguments = [f"--{name.replace('_', '-')}={told}" for name, told in options.items()]
        try:
            with contextlib.redirect_stdout(sys.stderr):
                app(["size", *arguments, f"--json={result}"], standalone_mode=False)
        except typer.BadParameter as error:
            field = error.param.name if error.param is not None else ""
            if folder in error.message:
                field = "model"
            return _error(error.message.replace(f"{folder}/", ""), field or "")
        return {"said": json.loads(result.read_text())["said"]}


def _refused(options: dict[str, Any], asked: dict[str, Any]) -> dict[str, str] | None:
    """Return what is wrong with options that the command itself would take."""
    for name in options:
        if name not in OPTIONS:
            return _error(f"{name} is not an option of this form", name)
    for name in ("context", "device"):
        if name not in options:
            return _error("must be given", name)
    known = {*model_names(), *asked["served"]}
    if asked["config"] is None and options.get("model") not in known:
        return _error("give a config.json, or one of the models that are listed", "model")
    if options.get("policy", "evenflow") not in PRESETS:
        return _error(f"one of {', '.join(PRESETS)}", "policy")
    return None


def _error(message: str, field: str) -> dict[str, str]:
    return {"error": message, "field": field}


def main() -> None:
    os.nice(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    print(json.dumps(answer(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
