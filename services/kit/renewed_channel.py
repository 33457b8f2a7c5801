"""A client's channel whose certificates may be renewed while it is open."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import structlog
from grpc import aio

from services.kit.tls import moments
from services.kit.transport import Certificates

log = structlog.get_logger()


class RenewedChannel:
    """Stubs are made of it as of any channel. A call that begins after the certificates' files
    have changed goes through a new channel, which shows and trusts what they hold then; calls on
    an older one end there, and it stays open for them until this is closed.
    """

    def __init__(self, certificates: Certificates, open_channel: Callable[[], Any]) -> None:
        """`open_channel` reads the files, and opens a channel with an event loop or one without.

        Raises OSError if they cannot be read.
        """
        self._certificates = certificates
        self._open_channel = open_channel
        self._moments = moments(certificates)
        self._channels = [open_channel()]  # the newest is the last

    def __getattr__(self, name: str) -> Any:
        """Return a kind of call (`unary_unary`, …) or what else the newest channel has."""
        if name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return lambda *how, **named: self._calls(name, *how, **named)
        return getattr(self._newest(), name)

    def _calls(self, kind: str, *how: Any, **named: Any) -> Callable[..., Any]:
        """Return what calls one method, each time on the channel that is the newest then."""
        made: tuple[Any, Any] = None, None

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            channel = self._newest()
            if made[0] is not channel:
                made = channel, getattr(channel, kind)(*how, **named)
            return made[1](*arguments, **options)

        return call

    def _newest(self) -> Any:
        try:
            newest = moments(self._certificates)
            if newest != self._moments:
                self._channels.append(self._open_channel())
                self._moments = newest
        except OSError as error:  # as before: they may be half written
            log.warning("certificates_not_read", error=type(error).__name__)
        return self._channels[-1]

    def close(self, *grace: Any) -> Any:
        """Close every channel; a coroutine if closing one is."""
        closings = [channel.close(*grace) for channel in self._channels]
        return _all(closings) if isinstance(self._channels[-1], aio.Channel) else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(None)


async def _all(closings: list[Any]) -> None:
    for closing in closings:
        await closing
