"""How far the form of an answer is, told from the tokens that the answer has.

vLLM moves a grammar on with each step. Where thoughts come before the form, what it makes of a
token depends on those before it: so they are told one by one, as they came.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.structured_output import StructuredOutputManager


class _Growing:
    """A request of vLLM's, as far as its form is concerned, while its answer grows."""

    def __init__(self, request: Any) -> None:
        self.request_id = request.request_id
        self.use_structured_output = True
        self.structured_output_request = request.structured_output_request
        self.prompt_token_ids = request.prompt_token_ids
        self.all_token_ids = list(request.prompt_token_ids)


def advance(manager: StructuredOutputManager, request: Any, output_ids: Sequence[int]) -> bool:
    """Move a request's grammar, which is compiled, on by its first tokens.

    False: the form does not allow them. `request` may have them already.
    """
    growing = _Growing(request)
    for id in output_ids:
        growing.all_token_ids.append(id)
        if not manager.accept_tokens(growing, [id]):
            return False
    return True


class _Told:
    """Stands for a grammar: keeps what it is told."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def accept_tokens(self, _request_id: str, tokens: Sequence[int]) -> bool:
        self.ids += tokens
        return True


def ids_of_form(
    manager: StructuredOutputManager, request: Any, output_ids: Sequence[int]
) -> tuple[int, ...]:
    """Return those of an answer's tokens that its form must allow: none of what the model thinks.

    `request`: one of vLLM's that no engine has.
    """
    request.structured_output_request.grammar = told = _Told()
    advance(manager, request, output_ids)
    return tuple(told.ids)
