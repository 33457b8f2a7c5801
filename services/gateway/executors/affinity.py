"""What tells a conversation from others, whichever turn of it a request is. Pure."""

from collections.abc import Iterator
from hashlib import blake2b

from services.gateway.types import GenerationRequest
from services.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt

HEAD_CHARACTERS = 1_024  # of each message or of a text
HEAD_TOKENS = 256  # of a prompt of tokens


def conversation_of(request: GenerationRequest) -> bytes:
    """Return 16 bytes that all turns of a conversation have in common: of what its client calls it,
    or else of what it begins with, up to its user's first message; and of the group that
    shares its cached prefixes.
    """
    digest = blake2b(digest_size=16)
    session = request.session_id
    for part in (request.shared_cache, *((session,) if session else _head(request.prompt))):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.digest()


def _head(prompt: Prompt) -> Iterator[str]:
    match prompt:
        case TextPrompt(text):
            yield text[:HEAD_CHARACTERS]
        case TokenPrompt(token_ids):
            yield " ".join(map(str, token_ids[:HEAD_TOKENS]))
        case ChatPrompt(messages):
            for message in messages:
                yield message.content[:HEAD_CHARACTERS]
                if message.role == "user":
                    return
