"""vLLM's own detokeniser in front of our collector: which text belongs to which token."""

from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as EngineFinish
from vllm.v1.engine.output_processor import OutputProcessor

from lab.models import exactness_model
from services.executor.engine.collector import StepCollector
from services.executor.types import Delta, Token
from services.generation.finish import FinishReason

MULTI_BYTE = "naïve 日本語 🎉 ok"  # characters of 1, 2, 3 and 4 bytes


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(exactness_model())


class OneRequest:
    """One request in vLLM's output processor, fed token by token."""

    def __init__(self, tokenizer: Any, **sampling: Any) -> None:
        self.deltas: list[Delta] = []
        self._processor = OutputProcessor(tokenizer, log_stats=False)
        request = EngineCoreRequest(
            request_id="r-1",
            external_req_id="r",
            prompt_token_ids=[0, 300],
            mm_features=None,
            sampling_params=SamplingParams(output_kind=RequestOutputKind.DELTA, **sampling),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        collector = StepCollector("r-1", self.deltas.append)
        self._processor.add_request(request, None, None, 0, collector)

    def step(self, *ids: int, finish: EngineFinish | None = None) -> list[str]:
        """Feed one step's tokens; return the requests that the engine must abort for it."""
        output = EngineCoreOutput(request_id="r-1", new_token_ids=list(ids), finish_reason=finish)
        aborts: list[str] = self._processor.process_outputs([output]).reqs_to_abort
        return aborts

    def abort(self) -> None:
        self._processor.abort_requests(["r-1"], internal=True)

    @property
    def tokens(self) -> list[Token]:
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


def test_a_token_inside_a_character_has_no_text(tokenizer: Any) -> None:
    ids = tokenizer.encode(MULTI_BYTE, add_special_tokens=False)
    request = OneRequest(tokenizer)
    for id in ids:
        request.step(id)

    assert [token.id for token in request.tokens] == ids
    assert request.text == MULTI_BYTE
    # The emoji has four bytes and this tokenizer no token of its own for it.
    assert sum(not token.text for token in request.tokens) >= 3
    assert all("\ufffd" not in token.text for token in request.tokens)


def test_each_step_is_passed_on_before_the_next(tokenizer: Any) -> None:
    request = OneRequest(tokenizer)
    for number, id in enumerate(tokenizer.encode("one two three", add_special_tokens=False)):
        request.step(id)
        assert len(request.deltas) == number + 1


def test_several_tokens_of_one_step_come_together(tokenizer: Any) -> None:
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    request = OneRequest(tokenizer)
    request.step(*ids)

    assert [token.id for token in request.deltas[0].tokens] == ids
    assert request.text == "one two three"


def test_a_possible_stop_string_is_held_back_until_it_is_decided(tokenizer: Any) -> None:
    request = OneRequest(tokenizer, stop=["END"])
    for id in tokenizer.encode("xEyEN", add_special_tokens=False):
        request.step(id)
    assert not request.text.endswith("EN")

    for id in tokenizer.encode("z", add_special_tokens=False):
        request.step(id, finish=EngineFinish.LENGTH)

    assert request.text == "xEyENz"
    assert request.deltas[-1].ending is FinishReason.LENGTH


def test_a_stop_string_is_cut_and_the_engine_told(tokenizer: Any) -> None:
    request = OneRequest(tokenizer, stop=["END"])
    aborts: list[str] = []
    for id in tokenizer.encode("abc ENDxyz", add_special_tokens=False):
        aborts += request.step(id)

    assert request.text == "abc "
    assert request.deltas[-1].ending is FinishReason.STOP
    assert aborts == ["r-1"]


def test_a_stop_token_is_counted_and_has_no_text(tokenizer: Any) -> None:
    request = OneRequest(tokenizer)
    request.step(*tokenizer.encode("ok", add_special_tokens=False))
    request.step(tokenizer.eos_token_id, finish=EngineFinish.STOP)

    assert request.tokens[-1] == Token(tokenizer.eos_token_id, "")
    assert request.text == "ok"
    assert request.deltas[-1].ending is FinishReason.STOP


def test_an_ending_without_a_token_is_passed_on(tokenizer: Any) -> None:
    request = OneRequest(tokenizer)
    request.step(300)
    request.abort()

    assert request.deltas[-1] == Delta((), FinishReason.CANCELLED)
