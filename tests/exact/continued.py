"""Answers, and how an engine goes on with those that another one began."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.engine.step_runner import Hook, StepRunner, make_prompt
from services.executor.engine.collector import TOKENS_ONLY
from services.executor.engine.replay import Replay
from services.executor.request_tag import Begun, to_extra_args, with_begun
from services.executor.types import Delta
from services.pacing.types import NO_SERVICE_LEVEL

MAX_TOKENS = 48
BATCH = 12  # requests that are live at a time
MAX_STEPS = 20_000
PROMPT_LENGTHS = (9, 41, 200)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "number": {"type": "integer", "minimum": 0, "maximum": 99_999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 4},
    },
    "required": ["name", "number", "tags"],
    "additionalProperties": False,
}
WORDS = [f"{word} is the word of the day" for word in ("abracadabra", "abrasion", "abundance")]

# Over greedy sampling without an end of sequence. `form`: what the answer is held to.
KINDS: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.3},
    "seeded": {"temperature": 1.0, "seed": 11},
    "seeded, nucleus": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    "seeded, of few": {
        "temperature": 0.8,
        "top_k": 20,
        "min_p": 0.05,
        "seed": 9,
        "presence_penalty": 0.5,
    },
    "schema": {"form": {"json": json.dumps(SCHEMA)}},
    "schema, seeded": {"temperature": 1.0, "seed": 5, "form": {"json": json.dumps(SCHEMA)}},
    "any object": {"form": {"json_object": True}},
    "regex": {"form": {"regex": "([a-z]{3}-[0-9]{2};){6,9}"}},
    "choice": {"form": {"choice": WORDS}},
    "log-probabilities": {"logprobs": 5},
    "log-probabilities, seeded": {"temperature": 1.0, "seed": 3, "logprobs": 3},
    "least tokens and stop ids": {"min_tokens": 30, "stop_token_ids": list(range(10, 400))},
    "bad words, bias, allowed ids": {
        "logit_bias": {17: 3.0, 18: -50.0},
        "bad_words": ["the", "ing"],
        "allowed_token_ids": list(range(10, 1_500)),
    },
    "another seed": {"temperature": 1.0, "seed": 101},
}


@dataclass(frozen=True, slots=True)
class Question:
    """One request, and what is known of its answer."""

    prompt: Sequence[int]
    sampling: Mapping[str, Any]
    begun: tuple[int, ...] = ()  # tokens that another engine made


@dataclass(slots=True)
class Answer:
    """What an engine made of a request; what it was given is not in it."""

    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of each token
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[dict[int, str | None]] = field(default_factory=list)
    ending: tuple[str | None, str | None] = (None, None)  # and the string that it came to

    def rest(self, num_known: int) -> "Answer":
        """Return what is left of it behind so many tokens."""
        lists = (self.ids, self.texts, self.logprobs, self.likeliest)
        return Answer(*(one[num_known:] for one in lists), self.ending)


def questions(num_prompts: int) -> dict[str, Question]:
    """Return each kind of request, to so many prompts of different lengths."""
    return {
        f"{kind}/{n}": Question(make_prompt(_length(place, n), seed=n), sampling)
        for place, (kind, sampling) in enumerate(KINDS.items())
        for n in range(num_prompts)
    }


def _length(place: int, n: int) -> int:
    return PROMPT_LENGTHS[(place + n) % len(PROMPT_LENGTHS)]


def stopping(answers: Mapping[str, Answer], asked: Mapping[str, Question]) -> dict[str, Question]:
    """Return greedy requests that end at strings of their own text, which is told or is not."""
    found = {}
    for name in (name for name in asked if name.startswith("greedy/")):
        text = "".join(answers[name].texts)
        for is_told in (False, True):
            sampling = {"stop": [text[60:75], "z" * 20], "include_stop_str_in_output": is_told}
            key = f"stop string{', told' if is_told else ''}/{name}"
            found[key] = Question(asked[name].prompt, sampling)
    return found


def sampling_params(question: Question) -> Any:
    """Return vLLM's, which say what the request was begun with."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    given = {"temperature": 0.0, **question.sampling}
    form = given.pop("form", None)
    extra_args = to_extra_args(NO_SERVICE_LEVEL)
    if question.begun:
        now_s = time.monotonic()
        begun = Begun(list(question.begun), len(question.begun) // 2, now_s, now_s - 1.0)
        extra_args = with_begun(extra_args, begun, reads=True)
    return SamplingParams(
        max_tokens=MAX_TOKENS,
        ignore_eos=form is None,
        structured_outputs=None if form is None else StructuredOutputsParams(**form),
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra_args,
        **given,
    )


def ask(
    runner: StepRunner, asked: Mapping[str, Question], *, hook: Hook | None = None
) -> dict[str, Answer]:
    """Have an engine answer requests, a few at a time, or go on with their answers."""
    answers: dict[str, Answer] = {}
    waiting, live, step = list(asked.items()), set[str](), 0
    while waiting or live:
        while waiting and len(live) < BATCH:
            name, question = waiting.pop(0)
            answers[name] = answer = Answer()
            ending = _add(runner, name, question)
            if ending is None:
                live.add(name)
            else:
                answer.ending = (_name_of(ending), ending.stop_string or None)
        if hook is not None:
            hook(runner.scheduler, step)
        for output in runner.engine.step():
            _take(answers[output.request_id], output.outputs[0])
            if output.finished:
                live.discard(output.request_id)
        step += 1
        runner.scheduler.check_integrity()
        assert step < MAX_STEPS, "the engine makes no progress"
    runner._drain()
    return answers


def _add(runner: StepRunner, name: str, question: Question) -> Delta | None:
    """Hand a request to the engine; return how it ends if its answer is complete already."""
    engine = runner.engine
    prompt = {"prompt_token_ids": list(question.prompt)}
    params = sampling_params(question)
    core = engine.input_processor.process_inputs(
        name, prompt, params, supported_tasks=engine.get_supported_tasks()
    )
    engine.input_processor.assign_request_id(core)
    processor = engine.output_processor
    replayed = None
    if question.begun:
        replay = Replay(core, processor.tokenizer, TOKENS_ONLY)
        replayed = replay.run(question.begun, max_model_len=runner.case.max_model_len)
        if replayed.ending is not None:
            return replayed.ending
    processor.add_request(core, None, None, 0)
    if replayed is not None:
        state = processor.request_states[core.request_id]
        state.detokenizer, state.logprobs_processor = replayed.detokenizer, replayed.logprobs
    engine.engine_core.add_request(core)
    return None


def _name_of(ending: Delta) -> str:
    from services.generation.finish import FinishReason

    assert isinstance(ending.ending, FinishReason)
    return ending.ending.value


def _take(answer: Answer, completion: Any) -> None:
    ids = list(completion.token_ids)
    answer.ids += ids
    answer.texts += [""] * (len(ids) - 1) + [completion.text] if ids else []
    for id, place in zip(ids, completion.logprobs or (), strict=False):
        answer.logprobs.append(place[id].logprob)
        answer.likeliest.append({one: place[one].decoded_token for one in place})
    if completion.finish_reason is not None:
        reason = completion.stop_reason
        answer.ending = (completion.finish_reason, reason if isinstance(reason, str) else None)
