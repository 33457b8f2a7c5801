"""`python -m lab.slow_device`: the executor, on an emulated device.

Its settings are the executor's, and layer-wise KV must be on; `LAB_LAYER_TIME` has the device's
time, as JSON.
"""

import json
import os
from typing import Any

from lab.slow_device.emulated_device import VARIABLE, LayerTime, emulate
from services.executor import app


def load_model(settings: Any, rendezvous_port: int) -> Any:
    """Load the model as the executor does, on an emulated device."""
    from services.executor.engine import engine  # imports vLLM, whose environment is set by now

    layer_time = LayerTime(**json.loads(os.environ[VARIABLE]))
    make_config = engine.make_config
    engine.make_config = lambda *args, **kwargs: emulate(make_config(*args, **kwargs), layer_time)
    return engine.Engine.load_model(settings, rendezvous_port=rendezvous_port)


if __name__ == "__main__":
    app._load_model = load_model
    app.main()
