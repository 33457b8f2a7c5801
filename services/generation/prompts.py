"""What a model is to go on from, and how text becomes tokens."""

from dataclasses import dataclass
from typing import TypeAlias

from services.generation.conversation import DEFAULT_OPTIONS, ChatMessage, ConversationOptions


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that the executor tokenises."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as they are."""

    token_ids: tuple[int, ...]  # at least one, each in [0, 2^31)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that the executor renders through the chat template."""

    messages: tuple[ChatMessage, ...]  # oldest first, at least one
    options: ConversationOptions = DEFAULT_OPTIONS


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeOptions:
    """How text or a conversation becomes token ids, and for which client."""

    omits_special_tokens: bool = False  # of text only
    omits_generation_prompt: bool = False  # of a conversation only
    with_texts: bool = False
    fair_key: str = ""  # the client among which the work is shared; empty: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenization:
    """Text or a conversation as token ids."""

    ids: tuple[int, ...]
    texts: tuple[str, ...] = ()  # the vocabulary's entry of each id, or none
    max_model_len: int
