"""How a body was written down: what it is called, and how it was made smaller."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

from services.gateway.errors import UnsupportedBodyError
from services.kit.errors import InvalidRequestError

PIECE_BYTES = 64 << 10  # decompressed in one turn of the event loop
_WINDOW_BITS: Mapping[str, int] = MappingProxyType({"gzip": 31, "x-gzip": 31, "deflate": 15})


def check_media_type(content_type: str) -> None:
    """Raise UnsupportedBodyError unless a body is called JSON.

    A page in a browser may send what is called otherwise, or nothing, to any server that it can
    reach; for JSON the browser asks that server first.
    """
    name = content_type.partition(";")[0].strip().lower()
    if name != "application/json" and not (
        name.startswith("application/") and name.endswith("+json")
    ):
        raise UnsupportedBodyError("content-type: must be application/json")


async def decoded(chunks: AsyncIterator[bytes], coding: str) -> AsyncIterator[bytes]:
    """Yield what a body was before its `content-encoding`; of a smaller one pieces of at most
    PIECE_BYTES, between which the event loop goes on.

    Raises UnsupportedBodyError, InvalidRequestError if the body is not of that coding.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        async for chunk in chunks:
            yield chunk
        return
    if coding not in _WINDOW_BITS:
        raise UnsupportedBodyError("content-encoding: must be gzip or deflate")
    inflater = zlib.decompressobj(_WINDOW_BITS[coding])
    try:
        async for chunk in chunks:
            while chunk:
                yield inflater.decompress(chunk, PIECE_BYTES)
                chunk = inflater.unconsumed_tail
                await asyncio.sleep(0)
            if inflater.unused_data:
                break
        yield inflater.flush()
    except zlib.error:
        raise InvalidRequestError(f"the body is not valid {coding}") from None
    if not inflater.eof or inflater.unused_data:
        raise InvalidRequestError(f"the body is not valid {coding}: it has no end, or more behind")
