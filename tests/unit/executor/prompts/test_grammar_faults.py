"""What the compiler of grammars takes, and what it says of the others."""

import pytest

pytest.importorskip("xgrammar")

from services.executor.prompts import grammar_process
from services.executor.prompts.grammar_process import (
    NO_ANSWER,
    TOO_LARGE,
    fault_of,
    make_compiler,
)
from tests.byte_tokenizer import describe_tokenizer


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", 'root ::= "a" | root "b"'),
        ("grammar", 'root ::= ""'),
        ("regex", "(ab)+"),
        ("json", '{"type": "object", "properties": {"child": {"$ref": "#"}}}'),
        ("json", '{"type": "object", "patternProperties": {"^a": {"type": "string"}}}'),
    ],
)
def test_a_form_that_an_answer_can_have_is_taken(kind: str, text: str) -> None:
    assert fault_of(make_compiler(describe_tokenizer()), kind, text) == ""


@pytest.mark.parametrize(
    ("kind", "text", "fault"),
    [
        ("grammar", "root ::= root", NO_ANSWER),
        ("grammar", 'root ::= other\nother ::= root "x"', NO_ANSWER),
        ("json", '{"$ref": "#"}', NO_ANSWER),
        ("json", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', NO_ANSWER),
        ("regex", "[^\\x00-\\U0010ffff]", NO_ANSWER),
        (
            "json",
            '{"type": "object", "patternProperties": {"(": {}}}',
            "Regex parsing error at position 2: The parenthesis is not closed.",
        ),
    ],
)
def test_a_form_that_no_answer_can_have_has_a_fault(kind: str, text: str, fault: str) -> None:
    assert fault_of(make_compiler(describe_tokenizer()), kind, text) == fault


def test_a_form_that_the_engine_would_keep_much_for_has_a_fault(monkeypatch) -> None:
    monkeypatch.setattr(grammar_process, "MAX_COMPILED_BYTES", 1)

    assert fault_of(make_compiler(describe_tokenizer()), "regex", "(ab)+") == TOO_LARGE
