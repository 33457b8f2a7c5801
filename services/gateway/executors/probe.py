"""Whether an engine lives that has made no step: one request tells."""

from collections.abc import Callable, Sequence

from services.gateway.errors import LinkBrokenError
from services.gateway.types import Token
from services.generation.finish import FinishReason
from services.generation.logprobs import EchoedPrompt
from services.generation.retention import Retained
from services.kit.errors import ServiceError


class Probe:
    """The sink of a request that shows whether an engine lives that made no step."""

    def __init__(self, proven: Callable[[], None]) -> None:
        """`proven` is called once the executor has answered in any way."""
        self._proven = proven

    def accepted(self, num_prompt_tokens: int, max_tokens: int = 0, prompt_digest: int = 0) -> None:
        """Wait on: a hanging engine's front accepts, too."""

    def rejected(self, error: ServiceError) -> None:
        self._proven()

    def echoed(self, prompt: EchoedPrompt) -> None:
        """Do nothing: it was not asked for."""

    def extended(self, tokens: Sequence[Token], generated_s: float) -> None:
        """Wait for the ending."""

    def retained(self, retained: Retained) -> None:
        """Nothing is asked to be kept."""

    def ended(
        self,
        reason: FinishReason,
        num_reasoning_tokens: int | None = None,
        num_cached_tokens: int = 0,
        stop_string: str = "",
    ) -> None:
        self._proven()

    def failed(self, error: ServiceError) -> None:
        """Wait for another one, if this one was lost with its stream."""
        if not isinstance(error, LinkBrokenError):
            self._proven()

    def is_waited_for(self, now_s: float) -> bool:
        return True
