"""A timeline of steps, layers and copies, as Chrome's trace viewer reads it."""

import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from services.executor.copies.copy_engine import Direction

MAX_EVENTS = 500_000  # the last ones are kept


class StepTrace:
    """Collects events on the engine's thread and on the copying threads."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._lock = threading.Lock()
        self._step = 0
        self._step_begin_s = 0.0
        self._layer_begin_s = 0.0

    def begin_step(self, step: int) -> None:
        self._step, self._step_begin_s = step, time.perf_counter()

    def end_step(self) -> None:
        self._add("step", f"step {self._step}", self._step_begin_s, time.perf_counter())

    def begin_layer(self, layer_name: str) -> None:
        """Note that a layer's KV is there: what came before was waiting or another layer."""
        self._layer_begin_s = time.perf_counter()

    def end_layer(self, layer_name: str) -> None:
        self._add("attention", layer_name, self._layer_begin_s, time.perf_counter())

    def add_copy(
        self, direction: Direction, group: int, num_bytes: int, begin_s: float, end_s: float
    ) -> None:
        self._add(direction.value, f"group {group}", begin_s, end_s, num_bytes=num_bytes)

    def _add(self, track: str, name: str, begin_s: float, end_s: float, **args: Any) -> None:
        event = {
            "ph": "X",
            "pid": 0,
            "tid": track,
            "name": name,
            "ts": begin_s * 1e6,  # the format counts microseconds
            "dur": (end_s - begin_s) * 1e6,
            "args": {"step": self._step, **args},
        }
        with self._lock:
            self._events.append(event)

    def write(self) -> None:
        """Write what was collected, replacing the file."""
        with self._lock:
            events = list(self._events)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"traceEvents": events}))
