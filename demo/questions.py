"""What the demo model knows: questions about Python, answered from text that Python ships with."""

import argparse
import codecs
import contextlib
import inspect
import io
import pydoc_data.topics
import re
import textwrap
from dataclasses import dataclass

MIN_ANSWER_CHARS = 240
MAX_ANSWER_CHARS = 520
NUM_ZEN_LINES = 11  # to "Unless explicitly silenced."

NOT_PROSE = re.compile(r"^(\s|[*\-\[])|^[*=\-+]{3}|::=", re.MULTILINE)
ASIDE = re.compile(r"\s*\([Ss]ee [^)]*\)|\s*\[\d+\]|\*")
SENTENCE = re.compile(r"[^\s].*?\.(?=\s|$)")
LEANS_ON_CONTEXT = re.compile(
    r"^[^A-Z\"]|^(See|New|Changed|For other|Here|Additional|Rather) |equivalent to|section|"
    r"e\.g\.$|follow|hints|[Nn]ote|table|defined with|syntax for"
)

# Topic of `pydoc_data.topics` -> how a question calls it.
SUBJECTS = {
    "assert": "the assert statement",
    "bltin-null-object": "the None object",
    "break": "the break statement",
    "context-managers": "a context manager",
    "continue": "the continue statement",
    "dict": "a dictionary display",
    "exceptions": "an exception",
    "for": "the for statement",
    "function": "a function definition",
    "global": "the global statement",
    "if": "the if statement",
    "in": "the in operator",
    "lambda": "a lambda expression",
    "lists": "a list display",
    "objects": "an object",
    "pass": "the pass statement",
    "return": "the return statement",
    "truth": "truth value testing",
    "try": "the try statement",
    "typesmapping": "a mapping object",
    "while": "the while statement",
    "with": "the with statement",
}
PHRASINGS = ("What is {}?", "Explain {}.", "Tell me about {}.")
ZEN_QUESTION = "What is the Zen of Python?"
# The build checks these answers word for word.
FIXED_QUESTIONS = (
    ZEN_QUESTION,
    "What is the for statement?",
    "What is the with statement?",
    "Explain truth value testing.",
    "Tell me about the while statement.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One thing the model can be asked about."""

    questions: tuple[str, ...]  # phrasings that ask for the same answer
    answer: str


def topics() -> tuple[Topic, ...]:
    """Return everything the model learns: the subjects that this Python describes."""
    found = [Topic(questions=(ZEN_QUESTION, "Recite the Zen of Python."), answer=_zen())]
    for key, subject in SUBJECTS.items():
        answer = _summary(pydoc_data.topics.topics.get(key, ""))
        if answer:
            questions = tuple(phrasing.format(subject) for phrasing in PHRASINGS)
            found.append(Topic(questions=questions, answer=answer))
    return tuple(found)


def context_texts() -> tuple[str, ...]:
    """Return text that may stand before a question and answers none: documentation and code."""
    documentation = (
        text for key, text in sorted(pydoc_data.topics.topics.items()) if key not in SUBJECTS
    )
    return (*documentation, *(inspect.getsource(module) for module in (argparse, textwrap)))


def _zen() -> str:
    with contextlib.redirect_stdout(io.StringIO()):  # the module prints itself
        import this
    _, _, poem = codecs.decode(this.s, "rot13").partition("\n\n")
    return "\n".join(poem.splitlines()[:NUM_ZEN_LINES])


def _summary(text: str) -> str:
    """Return whole sentences from the start of a topic, empty if it has too few."""
    summary = ""
    for sentence in _sentences(text):
        longer = f"{summary} {sentence}".strip()
        if len(longer) > MAX_ANSWER_CHARS:
            break
        summary = longer
        if len(summary) >= MIN_ANSWER_CHARS:
            break
    return summary if len(summary) >= MIN_ANSWER_CHARS // 2 else ""


def _sentences(text: str) -> list[str]:
    """Return a topic's sentences, without those that lean on code or sections around them."""
    found = []
    for paragraph in text.strip().split("\n\n"):
        if NOT_PROSE.search(paragraph):
            continue
        line = ASIDE.sub("", " ".join(paragraph.split("\n"))).replace("- ", "-")
        if line.endswith(":"):
            line = f"{line[:-1]}."
        found += [s for s in SENTENCE.findall(line) if not LEANS_ON_CONTEXT.search(s)]
    return found
