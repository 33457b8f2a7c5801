"""The documents: their links lead somewhere, their pictures are what their sources give."""

import re
from functools import cache
from pathlib import Path

import pytest

from bench.concept_pictures import FOLDER, pictures

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
