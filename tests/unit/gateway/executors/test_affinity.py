"""What tells a conversation from others."""

from services.gateway.executors.affinity import conversation_of
from services.gateway.types import GenerationRequest, RequestId
from services.generation.conversation import ChatMessage
from services.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt

FIRST = (("system", "be brief"), ("user", "hello"))
SECOND = (*FIRST, ("assistant", "hi"), ("user", "and now?"))


def of(prompt: Prompt, **fields: str) -> bytes:
    request = GenerationRequest(request_id=RequestId("r"), model="m", prompt=prompt, **fields)
    return conversation_of(request)


def chat(*turns: tuple[str, str]) -> ChatPrompt:
    return ChatPrompt(tuple(ChatMessage(role=role, content=content) for role, content in turns))


def test_all_turns_of_a_conversation_are_one() -> None:
    other = (*FIRST, ("assistant", "hi"), ("user", "another branch"))

    assert of(chat(*FIRST)) == of(chat(*SECOND)) == of(chat(*other))


def test_conversations_differ_by_their_beginning() -> None:
    beginnings = [
        FIRST,
        (("system", "be brief"), ("user", "hello!")),
        (("system", "be long"), ("user", "hello")),
        (("user", "hello"),),
    ]

    assert len({of(chat(*turns)) for turns in beginnings}) == 4


def test_who_shares_no_cached_prefix_shares_no_conversation() -> None:
    prompt = chat(*FIRST)
    whose = [
        of(prompt),
        of(prompt, tenant="alice"),
        of(prompt, tenant="bob"),
        of(prompt, tenant="bob", cache_salt="s"),
    ]

    assert len(set(whose)) == 4


def test_plain_prompts_are_told_by_their_first_tokens() -> None:
    assert of(TextPrompt("a" * 1_024 + "b")) == of(TextPrompt("a" * 1_024 + "c"))
    assert of(TextPrompt("a" * 1_023 + "b")) != of(TextPrompt("a" * 1_023 + "c"))
    assert of(TokenPrompt((1,) * 256 + (2,))) == of(TokenPrompt((1,) * 256 + (3,)))
    assert of(TokenPrompt((1,) * 255 + (2,))) != of(TokenPrompt((1,) * 255 + (3,)))
    assert of(TokenPrompt((1, 23))) != of(TokenPrompt((12, 3)))


def test_a_session_is_one_whatever_is_said_in_it_and_each_tenant_s_own() -> None:
    first, other = chat(*FIRST), chat(("user", "something else"))

    assert of(first, session_id="s") == of(other, session_id="s")
    assert of(first, session_id="s") != of(first, session_id="t")
    assert of(first, session_id="s") != of(first, session_id="s", tenant="alice")


def test_any_text_has_a_conversation() -> None:
    assert of(TextPrompt("\ud800 ü 漢"))
