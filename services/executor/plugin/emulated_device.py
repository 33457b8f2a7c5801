"""A slower device than the one at hand: every layer takes a set time.

A small model's layers take a fraction of a millisecond on a CPU, and whatever else the machine
does decides how long. Padded to milliseconds they take the same time again and again, so that
overlap, stalls and policies can be measured on a busy laptop.
"""

import time
from collections.abc import Callable

from services.executor.kv_options import LayerTime

MIN_SLEEP_S = 1e-4  # what is left below it is made up for in the next layer


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
