"""How the demo asks."""

from cli.client.answer import Question, Sampling
from demo.model import SAMPLING

SEED = 7


def question(text: str, *, context: str = "", max_tokens: int, request_id: str = "") -> Question:
    """Return a question with the sampling that suits the model, drawn alike every time."""
    return Question(
        text=text,
        context=context,
        sampling=Sampling(seed=SEED, **SAMPLING),
        max_tokens=max_tokens,
        request_id=request_id,
    )
