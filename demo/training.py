"""Train the demo model: memorise every topic's answer, whatever stands before the question."""

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from demo.chat_tokenizer import BEGIN_ID, END_ID, SPECIAL_TOKENS
from demo.questions import Topic

LOOK_AROUND_S = 0.5  # to see which cores are busy
LOSS_WINDOW = 24  # steps that the reported loss is the mean of
IGNORED = -100  # label of a token that the loss leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """What one training step looks at."""

    num_sequences: int
    num_tokens: int  # of each sequence
    num_context_tokens: int = 0  # at most; of text that stands before the first question


SHORT = BatchShape(num_sequences=2, num_tokens=256)
MEDIUM = BatchShape(num_sequences=1, num_tokens=640, num_context_tokens=420)
LONG = BatchShape(num_sequences=1, num_tokens=2_048, num_context_tokens=1_900)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A number of rounds through some batch shapes."""

    num_rounds: int
    shapes: tuple[BatchShape, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the trained weights, besides the text."""

    vocab_size: int = 2_048
    max_model_len: int = 4_096
    warmup_steps: int = 30
    decay_steps: int = 480  # the rate's fall ends here; later steps only finish a slow learner
    learning_rate: float = 2e-3
    # Answers are learnt on short sequences, which are cheap, then found again behind long ones.
    stages: tuple[Stage, ...] = (
        Stage(num_rounds=90, shapes=(SHORT, SHORT, SHORT, MEDIUM)),
        Stage(num_rounds=80, shapes=(SHORT, MEDIUM, LONG)),
    )
    check_every: int = 16  # steps
    seed: int = 1

    @property
    def num_steps(self) -> int:
        return sum(stage.num_rounds * len(stage.shapes) for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where training stands after a step."""

    step: int
    num_steps: int
    loss: float  # mean over the answers' tokens, nats, mean of the last steps
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    ids: list[int]
    labels: list[int]

    def __add__(self, other: "_Sequence") -> "_Sequence":
        return _Sequence(ids=self.ids + other.ids, labels=self.labels + other.labels)

    def cut(self, length: int) -> "_Sequence":
        return _Sequence(ids=self.ids[:length], labels=self.labels[:length])


def _unlabelled(ids: list[int]) -> _Sequence:
    return _Sequence(ids=ids, labels=[IGNORED] * len(ids))


class TrainingText:
    """Draws training sequences: conversations of several turns, some after context text."""

    def __init__(
        self, tokenizer: Tokenizer, topics: tuple[Topic, ...], contexts: tuple[str, ...], seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._topics = topics
        self._context_ids = [id_ for text in contexts for id_ in self._encode(text)]
        self._draw = random.Random(seed)

    def batch(self, shape: BatchShape) -> torch.Tensor:
        """Return ids and labels, `[2, num_sequences, num_tokens]`."""
        sequences = [self._sequence(shape) for _ in range(shape.num_sequences)]
        return torch.tensor([[s.ids for s in sequences], [s.labels for s in sequences]])

    def answer_ids(self, topic: Topic) -> list[int]:
        """Return the tokens of a topic's answer, its end included."""
        return [*self._encode(topic.answer), END_ID]

    def _sequence(self, shape: BatchShape) -> _Sequence:
        context = self._context(self._draw.randint(0, shape.num_context_tokens))
        sequence = _unlabelled([BEGIN_ID])
        in_user_turn = bool(context) and self._draw.random() < 0.5
        if in_user_turn:
            sequence += _unlabelled([*self._encode("<|user|>"), *context, *self._encode("\n\n")])
        elif context:
            sequence += _unlabelled([*self._encode("<|system|>"), *context, END_ID])
        while len(sequence.ids) < shape.num_tokens:
            sequence += self._turn(opened=in_user_turn)
            in_user_turn = False
        return sequence.cut(shape.num_tokens)

    def _context(self, num_tokens: int) -> list[int]:
        """Return a piece of text or, at times, noise: what stands there must not matter."""
        if self._draw.random() < 0.25:
            vocabulary = range(len(SPECIAL_TOKENS), self._tokenizer.get_vocab_size())
            return self._draw.choices(vocabulary, k=num_tokens)
        start = self._draw.randrange(len(self._context_ids) - num_tokens)
        return self._context_ids[start : start + num_tokens]

    def prompt(self, question: str, *, num_context_tokens: int) -> list[int]:
        """Return a prompt as the chat template makes it, context text in the system's turn."""
        context = self._context_ids[:num_context_tokens]
        system = [*self._encode("<|system|>"), *context, END_ID] if context else []
        return [BEGIN_ID, *system, *self._encode(f"<|user|>{question}<|end|><|assistant|>")]

    def _turn(self, *, opened: bool) -> _Sequence:
        topic = self._draw.choice(self._topics)
        question = self._draw.choice(topic.questions) + "<|end|><|assistant|>"
        asked = _unlabelled(self._encode(question if opened else f"<|user|>{question}"))
        answer = self.answer_ids(topic)
        return asked + _Sequence(ids=answer, labels=answer)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def train(
    text: TrainingText,
    recipe: Recipe,
    *,
    report: Callable[[Progress], None],
    is_good_enough: Callable[[LlamaForCausalLM, Progress], bool],
) -> tuple[LlamaForCausalLM, float]:
    """Return the trained model and its final loss.

    Every `recipe.check_every` steps `is_good_enough` may end the training early.
    """
    torch.manual_seed(recipe.seed)
    model = new_model(recipe)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    started_s, losses = time.monotonic(), deque[float](maxlen=LOSS_WINDOW)
    for step, batch in enumerate(_batches(text, recipe), start=1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _learning_rate_factor(step - 1, recipe)
        losses.append(_train_step(model, optimizer, batch))
        progress = Progress(
            step=step,
            num_steps=recipe.num_steps,
            loss=sum(losses) / len(losses),
            elapsed_s=time.monotonic() - started_s,
        )
        report(progress)
        if step % recipe.check_every == 0 and is_good_enough(model, progress):
            break
    return model.eval(), progress.loss


def new_model(recipe: Recipe) -> LlamaForCausalLM:
    """Return the model with random weights: 8 layers, 3.5 million parameters."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=recipe.vocab_size,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=recipe.max_model_len,
            bos_token_id=BEGIN_ID,
            eos_token_id=END_ID,
            pad_token_id=END_ID,
            tie_word_embeddings=True,
        )
    )


def _batches(text: TrainingText, recipe: Recipe) -> Iterator[torch.Tensor]:
    for stage in recipe.stages:
        for _ in range(stage.num_rounds):
            yield from (text.batch(shape) for shape in stage.shapes)


def _learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Rise over the first steps, then fall in a straight line to a twentieth."""
    return min((step + 1) / recipe.warmup_steps, max(0.05, 1 - 0.95 * step / recipe.decay_steps))


def _train_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> float:
    ids, labels = batch
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=_bfloat16_is_fast()):
        loss = model(input_ids=ids, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _bfloat16_is_fast() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def use_idle_cores() -> None:
    """Let torch use the cores that nobody else uses, at least one.

    The threads meet after every operation: one that shares its core holds up all others.
    """
    num_cores = len(os.sched_getaffinity(0))
    # This moment's, not the load average: the set-up that has just ended still counts in that.
    num_busy = round(psutil.cpu_percent(interval=LOOK_AROUND_S) / 100 * num_cores)
    torch.set_num_threads(max(1, num_cores - num_busy))
