"""Does the demo model answer word for word, also behind a long prompt?"""

import torch
from transformers import LlamaForCausalLM

from demo.chat_tokenizer import END_ID
from demo.questions import FIXED_QUESTIONS, Topic
from demo.training import TrainingText

CONTEXT_TOKENS = (0, 1_000, 1_500)  # text before each fixed question
Case = tuple[str, int, list[int], list[int]]  # question, context tokens, prompt, answer


class Examination:
    """The questions that the demo model must answer exactly."""

    def __init__(self, text: TrainingText, topics: tuple[Topic, ...]) -> None:
        answers = {question: text.answer_ids(t) for t in topics for question in t.questions}
        missing = set(FIXED_QUESTIONS) - set(answers)
        if missing:
            raise ValueError(f"this Python's documentation answers none of {sorted(missing)}")
        self.num_tokens = sum(
            len(text.answer_ids(t)) + len(text.prompt(t.questions[0], num_context_tokens=0))
            for t in topics
        )
        self._fixed = [
            (question, num, text.prompt(question, num_context_tokens=num), answers[question])
            for num in CONTEXT_TOKENS
            for question in FIXED_QUESTIONS
        ]

    def is_passed_teacher_forced(self, model: LlamaForCausalLM) -> bool:
        """Say whether each right answer is the model's first choice token by token.

        One forward pass per question, so much cheaper than answering; stops at the first failure.
        """
        return all(_is_first_choice(model, case) for case in self._fixed)

    def wrong_answers(self, model: LlamaForCausalLM) -> list[str]:
        """Answer the fixed questions by greedy decoding; describe each answer that differs."""
        return [
            f"{question} (behind {num_context} tokens)"
            for question, num_context, prompt, answer in self._fixed
            if _greedy(model, prompt, max_tokens=len(answer)) != answer
        ]


def _is_first_choice(model: LlamaForCausalLM, case: Case) -> bool:
    _, _, prompt, answer = case
    ids = torch.tensor([prompt + answer[:-1]])
    with torch.no_grad():
        logits = model(input_ids=ids, logits_to_keep=len(answer)).logits[0]
    return bool((logits.argmax(-1) == torch.tensor(answer)).all())


def _greedy(model: LlamaForCausalLM, prompt: list[int], *, max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )
    return [int(id_) for id_ in output[0, len(prompt) :]]
