"""The documents: their links lead somewhere, their pictures are what their sources give."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from bench.concept_pictures import FOLDER, pictures

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
SPAN = re.compile(r"`[^`]*`")
ADDRESS = re.compile(r"\]\([^)]*\)|[\w./-]+\.md")
# A sentence of the docs names its subject: a request, a reader, a gateway, a rank, a block, a copy.
PERSON = re.compile(r"\b(?:who|whom|nobody|somebody|he)\b", re.IGNORECASE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_about_requests_readers_ranks_and_blocks(page: Path) -> None:
    assert [line for line in words(page).splitlines() if PERSON.search(line)] == []


def words(page: Path) -> str:
    """Return what is neither code nor an address."""
    return ADDRESS.sub("", SPAN.sub("", prose(page)))


# Folders whose docstrings and comments are held to the same words.
WORDED = ("bench", "cli", "lab", "services", "simulator")
MODULES = [path for folder in WORDED for path in sorted(ROOT.glob(f"{folder}/**/*.py"))]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))
def test_docstrings_and_comments_are_about_requests_readers_ranks_and_blocks(module: Path) -> None:
    source = module.read_text()

    assert [said for said in spoken(source) if PERSON.search(SPAN.sub("", said))] == []


def spoken(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of a module of Python."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_the_page_speaks_of_the_same() -> None:
    sources = [path for path in ROOT.glob("ui/src/*") if path.suffix in {".ts", ".css", ".html"}]

    assert sources
    assert [path.name for path in sources if PERSON.search(path.read_text())] == []


def test_a_docstring_and_a_comment_are_found() -> None:
    found = list(spoken('''def f():\n    """Says who."""\n    return "nobody"  # for him\n'''))

    assert [said for said in found if said] == ["Says who.", "# for him"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    links = [link for link in LINK.findall(prose(page)) if "://" not in link]

    assert [link for link in links if not is_there(page, link)] == []


def is_there(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target.resolve()))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return what GitHub makes of a page's headings, and the page's own anchors."""
    text = prose(page)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text)]
    named = (heading.strip().replace(" ", "-") for heading in words)
    return frozenset([*named, *re.findall(r'<a id="([^"]+)">', text)])


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return CODE.sub("", page.read_text())


def test_the_pictures_of_the_concepts_are_what_their_program_draws() -> None:
    for name, drawn in pictures().items():
        assert (FOLDER / name).read_text() == drawn, "python -m bench.concept_pictures"


def test_no_page_is_long_but_those_of_results() -> None:
    pages = [page for page in PAGES if page.parent.name != "results"]
    lengths = {page.name: len(page.read_text().splitlines()) for page in pages}

    assert {name: length for name, length in lengths.items() if length > 250} == {}


def test_every_table_of_results_says_how_it_was_made() -> None:
    for page in ROOT.glob("docs/results/*.md"):
        rows = re.findall(r"^\| (command|commit|machine) \| \S", page.read_text(), re.MULTILINE)
        assert rows == ["command", "commit", "machine"], page.name


def test_a_newcomer_finds_an_answer_in_two_clicks() -> None:
    assert "](docs/questions.md)" in (ROOT / "README.md").read_text()
    questions = (ROOT / "docs/questions.md").read_text().split("\n## ")[1:]

    assert len(questions) == 10
    assert [question for question in questions if not LINK.search(question)] == []
