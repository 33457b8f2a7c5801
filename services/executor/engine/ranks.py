"""The ranks of a node without an engine: its followers' part of vLLM's executor."""

from vllm.v1.executor import Executor

from services.executor.engine.config import make_config
from services.executor.settings import ExecutorSettings


class Ranks:
    """Worker processes that take their steps from the leader's node."""

    def __init__(self, settings: ExecutorSettings, rendezvous_port: int) -> None:
        """Load the model's share: minutes. Raises whatever vLLM raises."""
        config = make_config(settings, rendezvous_port=rendezvous_port)
        self._executor = Executor.get_class(config)(config, monitor_workers=False)

    def wait_dead(self) -> None:
        """Return when a rank has died, and the others have ended."""
        self._executor.start_worker_monitor(inline=True)
