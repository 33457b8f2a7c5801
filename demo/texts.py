"""What is asked in the demo, and the text that stands before the questions."""

from cli.local.settings import ROOT

QUESTION = "Why is the sky blue? Answer in three sentences."
READERS_QUESTIONS = (
    "How does a bicycle stay upright?",
    "Why do leaves change their colour in autumn?",
    "What does a librarian do all day?",
    "How is bread made?",
)
NUM_LONG_CHARS = 9_900  # some 2,000 tokens
NUM_READERS_CHARS = 1_100  # some 220 tokens


def long_text() -> str:
    """Return text that answers no question: the licence, which every copy of this has."""
    return _licence()[:NUM_LONG_CHARS]


def readers_text(number: int) -> str:
    """Return another piece of it for each reader."""
    start = number * NUM_READERS_CHARS
    return _licence()[start : start + NUM_READERS_CHARS]


def _licence() -> str:
    text = (ROOT / "LICENSE").read_text()
    return "\n".join(line.strip() for line in text.splitlines())
