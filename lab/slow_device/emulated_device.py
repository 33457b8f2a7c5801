"""A slower device than the one at hand: every layer takes a set time.

A small model's layers take a fraction of a millisecond on a CPU, and whatever else the machine
does decides how long. Padded to milliseconds they take the same time again and again, so that
overlap, stalls and policies can be measured on a busy laptop.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

MIN_SLEEP_S = 1e-4  # what is left below it is made up for in the next layer
CONFIG_KEY = "lab_layer_time"
VARIABLE = "LAB_LAYER_TIME"  # of the environment of `python -m lab.slow_device`: JSON
SLOW_WORKER = "lab.slow_device.worker.SlowCPUWorker"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """How long a layer takes in a step, load waits excluded."""

    base_s: float = 0.0
    per_token_s: float = 0.0  # for each token of the step
    per_context_token_s: float = 0.0  # for each token that the attention of the step reads

    def of_step(self, *, num_tokens: int, num_context_tokens: int) -> float:
        return (
            self.base_s
            + self.per_token_s * num_tokens
            + self.per_context_token_s * num_context_tokens
        )


class EmulatedDevice:
    """Sleeps at the end of each layer until the layer has taken its time.

    A layer's own time starts with the end of the layer before it and stands still while the layer
    waits for KV, so that no wait hides in the padding. A layer that took too long, on a busy
    machine, shortens the padding of those after it in the same step.
    """

    def __init__(
        self,
        layer_time: LayerTime,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._layer_time = layer_time
        self._clock = clock
        self._sleep = sleep
        self._layer_s = 0.0  # before the first step there is nothing to pad
        self._late_s = 0.0  # own time of this step's layers beyond what they should have taken
        self._running_since_s = 0.0

    def begin_step(self, *, num_tokens: int, num_context_tokens: int) -> None:
        """Start the first layer's time."""
        self._layer_s = self._layer_time.of_step(
            num_tokens=num_tokens, num_context_tokens=num_context_tokens
        )
        self._late_s = -self._layer_s
        self.resume()

    def pause(self) -> None:
        """Stop the layer's time: it waits for KV."""
        self._late_s += self._clock() - self._running_since_s

    def resume(self) -> None:
        """Let the layer's time run."""
        self._running_since_s = self._clock()

    def end_layer(self) -> None:
        """Sleep for what is left of the layer's time. The next layer's begins with `resume`."""
        self.pause()
        if self._late_s < -MIN_SLEEP_S:
            self.resume()
            self._sleep(-self._late_s)
            self.pause()
        self._late_s -= self._layer_s


def emulate(config: Any, layer_time: LayerTime) -> Any:
    """Let layers of an engine with layer-wise KV on a CPU take a set time.

    `config`: vLLM's, before the engine is made. Returns it.
    """
    config.parallel_config.worker_cls = SLOW_WORKER
    config.additional_config[CONFIG_KEY] = asdict(layer_time)
    return config


def num_tokens_of(output: Any) -> tuple[int, int]:
    """Return the tokens of a step of vLLM's scheduler, and those that its attention reads."""
    num_computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    num_computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    num_read = sum(num_computed[name] + n for name, n in output.num_scheduled_tokens.items())
    return output.total_num_scheduled_tokens, num_read
