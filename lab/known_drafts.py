"""A drafter that knows the answers, and guesses right as often as it is asked to.

    KNOWN.answers, KNOWN.right_frac = {prompt: answer}, 0.8
    speculative = known_drafts(num_drafts=3)  # of an engine in this process

What it guesses depends on the tokens before it alone: two engines are given the same drafts at the
same place, whatever else is in their steps. An engine in a process of its own finds the answers in
a file, which KNOWN_ANSWERS of its environment names.
"""

import json
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KNOWN_ANSWERS = "EVENFLOW_LAB_KNOWN_ANSWERS"  # JSON: {"path", "right_frac"}
Tokens = tuple[int, ...]

SHORT_FRAC = 0.1  # of the drafts: these have fewer tokens than asked for, or none


@dataclass(slots=True)
class Known:
    """What the drafters of this process know."""

    answers: Mapping[Tokens, Sequence[int]] = field(default_factory=dict)  # by prompt
    right_frac: float = 1.0  # of the tokens drafted, each by itself

    def draft(self, tokens: Tokens, num_drafts: int) -> list[int]:
        """Return at most so many tokens that may follow; none where no answer is known."""
        answer = self._answer(tokens)
        rng = random.Random(f"{len(tokens)} {sum(tokens)}")
        if rng.random() < SHORT_FRAC:
            num_drafts = rng.randint(0, num_drafts)
        return [t if rng.random() < self.right_frac else abs(t - 1) for t in answer[:num_drafts]]

    def _answer(self, tokens: Tokens) -> Sequence[int]:
        """Return what follows `tokens`, by the longest prompt that they begin with."""
        prompts = [p for p in self.answers if tokens[: len(p)] == p]
        if not prompts:
            return ()
        prompt = max(prompts, key=len)
        return self.answers[prompt][len(tokens) - len(prompt) :]


KNOWN = Known()


class KnownDrafter:
    """vLLM makes one per worker, and asks it after each step."""

    def __init__(self, vllm_config: Any) -> None:
        self._num_drafts: int = vllm_config.num_speculative_tokens
        if given := os.environ.get(KNOWN_ANSWERS):
            _read(**json.loads(given))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def propose(
        self,
        sampled_token_ids: Iterable[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Return the drafts of each row; a prompt that is not complete yet gets none."""
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            known = token_ids_cpu[row, : num_tokens_no_spec[row]].tolist() if sampled else []
            drafts.append(KNOWN.draft(tuple(known), self._num_drafts))
        return drafts


def save_answers(path: Path, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Save prompts and their answers for engines in processes of their own."""
    path.write_text(json.dumps([[list(prompt), list(answer)] for prompt, answer in answers]))


def _read(path: str, right_frac: float) -> None:
    """Let the drafters of this process know what a file says."""
    answers = json.loads(Path(path).read_text())
    KNOWN.answers = {tuple(prompt): answer for prompt, answer in answers}
    KNOWN.right_frac = right_frac


def known_drafts(*, num_drafts: int) -> dict[str, Any]:
    """Return vLLM's `speculative_config`."""
    return {
        "method": "custom_class",
        "model": f"{__name__}.{KnownDrafter.__name__}",
        "num_speculative_tokens": num_drafts,
    }
