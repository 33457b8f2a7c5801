"""What a text model is told in place of images and other parts that are no text."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationInfo

from services.gateway.left_out.members import ignored, note

# By the type of a part, in all APIs: what it is called.
MEDIA: Mapping[str, str] = MappingProxyType(
    {
        "audio": "audio",
        "audio_url": "audio",
        "document": "document",
        "file": "file",
        "image": "image",
        "image_url": "image",
        "input_audio": "audio",
        "input_file": "file",
        "input_image": "image",
        "input_video": "video",
        "video": "video",
        "video_url": "video",
    }
)


class StandIn(str):
    """A line of its own in a text."""


def stand_in(part: Mapping[str, Any], info: ValidationInfo, place: str) -> StandIn | None:
    """Return the line for a part that is no text, and note its type at `place`; None if it is of
    another type. Raises ValueError where what has no effect is at fault.
    """
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in MEDIA:
        return None
    thing = MEDIA[kind]
    names = ignored(info)
    if names is None:
        plural = thing if thing == "audio" else f"{thing}s"
        raise ValueError(f"a part of type {kind}: the model takes no {plural}")
    note(names, place, kind)
    return StandIn(f"[{thing} left out: the model takes none]")


def joined(texts: Iterable[str]) -> str:
    """Return the text that parts form: texts one right after the other, lines apart."""
    last, whole = "", ""
    for text in texts:
        if whole and StandIn in (type(last), type(text)):
            whole += "\n"
        last, whole = text, whole + text
    return whole
