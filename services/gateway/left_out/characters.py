"""Halves of characters, which JSON may have and UTF-8 may not."""

import json
import re
from typing import Any

_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # a pair of them is a character


def whole_characters(decoded: Any) -> Any:
    """Return decoded JSON with each half of a character, as of an emoji cut in two, replaced by
    U+FFFD.
    """
    text = json.dumps(decoded, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def whole_json(text: str) -> str:
    """Return JSON text without such halves."""
    if not _ESCAPED_HALF.search(text):
        return text
    return json.dumps(whole_characters(json.loads(text)), ensure_ascii=False)
