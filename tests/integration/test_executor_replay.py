"""vLLM's front half brought to where an answer is: text, probabilities' texts, ends."""

from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists

from lab.models import exactness_model
from services.executor.engine.collector import Reporting
from services.executor.engine.replay import Replay, Replayed
from services.executor.types import RejectCode, RejectedError, Said
from services.generation.conversation import ToolCall
from services.generation.finish import FinishReason

TEXT = "naïve 日本語 🎉 and more of it"  # characters of 1 to 4 bytes, some of several tokens
MAX_MODEL_LEN = 100
PROMPT = [0, 300]
CACHED = Reporting(num_cached_tokens=32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(exactness_model())


@pytest.fixture(scope="module")
def ids(tokenizer: Any) -> list[int]:
    encoded: list[int] = tokenizer.encode(TEXT, add_special_tokens=False)
    return encoded


def make_core(**sampling: Any) -> EngineCoreRequest:
    given = {"max_tokens": 64, "output_kind": RequestOutputKind.DELTA} | sampling
    return EngineCoreRequest(
        request_id="r-1",
        external_req_id="r",
        prompt_token_ids=PROMPT,
        mm_features=None,
        sampling_params=SamplingParams(**given),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def replay(
    tokenizer: Any, ids: list[int], reporting: Reporting = CACHED, **sampling: Any
) -> Replayed:
    core = make_core(**sampling)
    return Replay(core, tokenizer, reporting).run(ids, max_model_len=MAX_MODEL_LEN)


class Front:
    """vLLM's front half with one answer, begun elsewhere or not."""

    def __init__(self, tokenizer: Any, begun: Replayed | None = None, **sampling: Any) -> None:
        self._processor = OutputProcessor(tokenizer, log_stats=False)
        self._processor.add_request(make_core(**sampling), None)
        if begun is not None:
            state = self._processor.request_states["r-1"]
            state.detokenizer, state.logprobs_processor = begun.detokenizer, begun.logprobs

    def step(self, id: int, *, scored: bool = False) -> tuple[str, Any]:
        """Return a token's text, and the texts of the likeliest."""
        pair = np.array([[id, id]])
        logprobs = LogprobsLists(pair, np.array([[-1.0, -1.0]]), np.array([1]), None)
        output = EngineCoreOutput("r-1", [id], new_logprobs=logprobs if scored else None)
        (told,) = self._processor.process_outputs([output]).request_outputs
        (completion,) = told.outputs
        return completion.text, completion.logprobs and completion.logprobs[0][id].decoded_token


def test_the_rest_of_the_text_and_of_probabilities_is_as_undisturbed_wherever_it_is_cut(
    tokenizer: Any, ids: list[int]
) -> None:
    sampling = {"logprobs": 1, "stop": ["not in it"]}
    whole = Front(tokenizer, **sampling)
    undisturbed = [whole.step(id, scored=True) for id in ids]
    assert sum(text != token for text, token in undisturbed) >= 3  # held back, half characters
    for cut in range(1, len(ids)):
        front = Front(tokenizer, replay(tokenizer, ids[:cut], **sampling), **sampling)

        assert [front.step(id, scored=True) for id in ids[cut:]] == undisturbed[cut:]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_what_is_told_again_is_what_was_told(
    tokenizer: Any, ids: list[int], logprobs: int | None
) -> None:
    sampling = {"logprobs": logprobs, "stop": ["not in it"]}
    whole = Front(tokenizer, **sampling)
    undisturbed = [whole.step(id, scored=logprobs is not None) for id in ids]
    for num_retold in range(len(ids) + 1):
        core = make_core(**sampling)
        found = Replay(core, tokenizer, CACHED).run(
            ids, max_model_len=MAX_MODEL_LEN, num_retold=num_retold
        )

        first = len(ids) - num_retold
        assert [token.id for token in found.retold] == ids[first:]
        told = [
            (token.text, token.logprobs and token.logprobs.chosen.token) for token in found.retold
        ]
        assert told == undisturbed[first:]


def ending(tokenizer: Any, ids: list[int], **sampling: Any) -> tuple[object, str]:
    found = replay(tokenizer, ids, **sampling).ending
    assert found is not None
    assert (found.tokens, found.num_cached_tokens) == ((), 32)
    return found.ending, found.stop_string


def test_an_answer_that_is_complete_gets_its_ending(tokenizer: Any, ids: list[int]) -> None:
    last = ids[-1]

    assert ending(tokenizer, ids, max_tokens=len(ids)) == (FinishReason.LENGTH, "")
    assert ending(tokenizer, ids, stop_token_ids=[last]) == (FinishReason.STOP, "")
    assert ending(tokenizer, ids, stop=["of it"]) == (FinishReason.STOP, "of it")
    long = [300] * (MAX_MODEL_LEN - len(PROMPT))
    assert ending(tokenizer, long, max_tokens=MAX_MODEL_LEN) == (FinishReason.LENGTH, "")


def test_an_answer_that_is_not_complete_gets_none(tokenizer: Any, ids: list[int]) -> None:
    assert replay(tokenizer, ids, max_tokens=len(ids) + 1).ending is None
    assert replay(tokenizer, ids, stop=["of it."]).ending is None
    assert replay(tokenizer, ids, stop=["of it"], min_tokens=len(ids) + 1).ending is None


@pytest.mark.parametrize("ends_at", ["a string", "a token"])
def test_an_answer_that_goes_on_behind_its_end_is_refused(
    tokenizer: Any, ids: list[int], ends_at: str
) -> None:
    sampling = {"stop": ["and"]} if ends_at == "a string" else {"stop_token_ids": [ids[3]]}
    with pytest.raises(RejectedError) as caught:
        replay(tokenizer, ids, **sampling)

    rejection = caught.value.rejection
    assert (rejection.code, rejection.field) == (
        RejectCode.INVALID_ARGUMENT,
        "resume.output_ids",
    )


CALL = ToolCall(id="c", name="f", arguments="{}")


class RecordingParser:
    """Takes down what it is told, and has a call in the end."""

    chose_calls, num_reasoning_tokens, is_read = True, 4, False
    tool_calls = (CALL,)

    def __init__(self) -> None:
        self.told: list[tuple[str, list[int], bool]] = []

    def parse(self, text: str, token_ids: Any, *, is_last: bool) -> Said:
        self.told.append((text, list(token_ids), is_last))
        return Said(text)


def test_a_parser_is_told_of_each_token_by_itself(tokenizer: Any, ids: list[int]) -> None:
    parser = RecordingParser()
    reporting = Reporting(parser=parser)
    found = replay(tokenizer, ids, reporting, stop_token_ids=[ids[-1]]).ending

    assert [told for _, (told,), _ in parser.told] == ids
    again = Replay(make_core(), tokenizer, Reporting(parser=RecordingParser()))
    retold = again.run(ids, max_model_len=MAX_MODEL_LEN, num_retold=2).retold
    assert [(token.id, token.is_read) for token in retold] == [(id, False) for id in ids[-2:]]
    last_text = tokenizer.decode([ids[-1]])
    assert "".join(text for text, _, _ in parser.told) == TEXT.removesuffix(last_text)
    assert [is_last for _, _, is_last in parser.told] == [False] * (len(ids) - 1) + [True]
    assert found is not None
    assert (found.ending, found.num_reasoning_tokens) == (FinishReason.TOOL_CALLS, 4)
    assert found.tool_calls == (CALL,)
