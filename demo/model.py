"""The demo model: built once, kept in .cache/models/demo. `python -m demo.model [DIRECTORY]`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import demo.chat_tokenizer
import demo.questions
from demo.cached_build import MODELS_ROOT, build_once, is_built, recipe_fingerprint
from demo.questions import context_texts, topics

if TYPE_CHECKING:
    from demo.training import Progress

DIRECTORY = MODELS_ROOT / "demo"
MAX_LOSS = 0.2  # nats per answer token; above it the build fails
GOOD_LOSS = 0.015  # from here on training may end early
LINE_EVERY_STEPS = 25  # off a terminal


class ModelQualityError(Exception):
    """The trained model misses the bar; nothing was saved."""


def demo_model(directory: Path = DIRECTORY) -> Path:
    """Return `directory`, training the model into it first if it is not there (two minutes)."""
    fingerprint = _fingerprint()
    if not is_built(directory, fingerprint):
        print("training the demo model (once, about two minutes on two cores)", flush=True)
    return build_once(directory, fingerprint, _build)


def _fingerprint() -> str:
    sources = (
        (Path(__file__).parent / name).read_text()
        for name in ("model.py", "training.py", "examination.py")
    )
    learnt = (text for topic in topics() for text in (*topic.questions, topic.answer))
    return recipe_fingerprint(demo.chat_tokenizer, demo.questions, *sources, *learnt)


def _build(directory: Path) -> None:
    from transformers.utils import logging

    from demo.chat_tokenizer import save_tokenizer, train_tokenizer
    from demo.examination import Examination
    from demo.training import Recipe, TrainingText, train, use_idle_cores

    logging.disable_progress_bar()
    use_idle_cores()
    recipe, learnt, contexts = Recipe(), topics(), context_texts()
    texts = [text for topic in learnt for text in (*topic.questions, topic.answer)]
    tokenizer = train_tokenizer([*texts * 4, *contexts], vocab_size=recipe.vocab_size)
    text = TrainingText(tokenizer, learnt, contexts, recipe.seed)
    examination = Examination(text, learnt)
    print(f"{len(learnt)} topics, {examination.num_tokens} tokens to learn", flush=True)
    model, loss = train(
        text,
        recipe,
        report=ProgressLine(),
        is_good_enough=lambda model, progress: (
            progress.loss <= GOOD_LOSS and examination.is_passed_teacher_forced(model)
        ),
    )
    print(f"\nfinal loss {loss:.3f}", flush=True)
    if loss > MAX_LOSS:
        raise ModelQualityError(f"the loss is {loss:.3f}, above {MAX_LOSS}")
    if wrong := examination.wrong_answers(model):
        raise ModelQualityError("wrong answers:\n" + "\n".join(wrong))
    print("the fixed questions are answered word for word, also behind a long prompt", flush=True)
    save_tokenizer(tokenizer, directory, max_model_len=recipe.max_model_len)
    model.save_pretrained(directory)


class ProgressLine:
    """Prints where training stands: one line that changes on a terminal, few lines elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()

    def __call__(self, progress: "Progress") -> None:
        line = (
            f"step {progress.step:4d} of at most {progress.num_steps}  loss {progress.loss:6.3f}  "
            f"{progress.elapsed_s:5.0f} s"
        )
        if self._is_terminal:
            print(f"\r{line}", end="", flush=True)
        elif progress.step % LINE_EVERY_STEPS == 0:
            print(line, flush=True)


if __name__ == "__main__":
    try:
        print(f"demo model: {demo_model(*map(Path, sys.argv[1:2]))}")
    except ModelQualityError as error:
        sys.exit(f"error: the demo model misses the bar: {error}")
