"""A worker on a CPU whose layers take the time of an emulated device."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from lab.slow_device.emulated_device import CONFIG_KEY, EmulatedDevice, LayerTime, num_tokens_of
from services.executor.plugin.cpu_worker import LayerwiseCPUWorker


class SlowCPUWorker(LayerwiseCPUWorker):
    """vLLM loads it by its name, which `emulated_device.emulate` gives it."""

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        layer_time = LayerTime(**self.vllm_config.additional_config[CONFIG_KEY])
        self._layers = PaddedLayers(get_kv_transfer_group(), EmulatedDevice(layer_time))
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        self._layers.step = num_tokens_of(scheduler_output)
        return super().execute_model(scheduler_output)


class PaddedLayers:
    """Stands around the hooks of a rank's connector, which every layer of every step then calls."""

    def __init__(self, connector: Any, device: EmulatedDevice) -> None:
        self.step = 0, 0  # tokens of the one that begins next, and those that it reads
        self._device = device
        self._start, self._load, self._save = (
            connector.start_load_kv,
            connector.wait_for_layer_load,
            connector.save_kv_layer,
        )
        connector.start_load_kv = self._begin_step
        connector.wait_for_layer_load = self._begin_layer
        connector.save_kv_layer = self._end_layer
        connector.watches_layers = True

    def _begin_step(self, *args: Any, **kwargs: Any) -> None:
        self._start(*args, **kwargs)
        num_tokens, num_read = self.step
        self._device.begin_step(num_tokens=num_tokens, num_context_tokens=num_read)

    def _begin_layer(self, *args: Any) -> None:
        self._device.pause()
        self._load(*args)
        self._device.resume()

    def _end_layer(self, *args: Any, **kwargs: Any) -> None:
        self._device.end_layer()
        self._save(*args, **kwargs)
        self._device.resume()
