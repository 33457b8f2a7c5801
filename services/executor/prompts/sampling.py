"""Sampling parameters as vLLM takes them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from services.executor.prompts.json_forms import ANY_OBJECT_TAG
from services.executor.request_tag import to_extra_args, with_fairness_id
from services.executor.types import Submission
from services.generation.sampling_params import (
    ADVISABLE,
    DEFAULT_SAMPLING,
    AnswerForm,
    SamplingParams,
    StructuredOutputs,
    check_sampling,
)
from services.kit.errors import InvalidRequestError

log = structlog.get_logger()

UNSEEDED = -1  # what vLLM takes for "not seeded", although it is a seed
SEED_OF_UNSEEDED = 2**63 - 1
NOT_WITH_DRAFTS = ("min_p", "logit_bias")  # what vLLM does not do beside speculative decoding


def to_vllm_sampling(
    submission: Submission, max_tokens: int, *, reads: bool = True, drafts: bool = False
) -> VllmSamplingParams:
    """Return vLLM's parameters; VLLMValidationError names what vLLM does not take. `reads`:
    whether tokens are read from the first one on; `drafts`: whether the engine speculates.
    """
    sampling = submission.sampling
    for name in NOT_WITH_DRAFTS if drafts else ():
        if getattr(sampling, name):
            raise VLLMValidationError(
                f"{name}: not with speculative decoding, which the model is served with",
                parameter=name,
            )
    if sampling.min_tokens > max_tokens:
        raise VLLMValidationError(
            f"min_tokens: must be at most {max_tokens}, what the answer may have",
            parameter="min_tokens",
        )
    scores_prompt = submission.echo and submission.resume is None  # else that was told
    return VllmSamplingParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        min_tokens=sampling.min_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        bad_words=list(sampling.bad_words),
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        skip_special_tokens=not sampling.keep_special_tokens,
        include_stop_str_in_output=sampling.include_stop,
        seed=vllm_seed(sampling),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.logprobs if scores_prompt else None,
        structured_outputs=to_vllm_outputs(sampling.structured_outputs),
        extra_args=with_fairness_id(
            to_extra_args(submission.service_level, reads=reads), submission.fairness_id
        ),
        output_kind=RequestOutputKind.DELTA,
    )


def speculates(vllm_config: Any) -> bool:
    """Return whether an engine decodes speculatively."""
    return vllm_config.speculative_config is not None


def vllm_seed(sampling: SamplingParams) -> int | None:
    """Return the seed as vLLM takes it."""
    return SEED_OF_UNSEEDED if sampling.seed == UNSEEDED else sampling.seed


def advised_sampling(advice: Mapping[str, Any], *, drafts: bool = False) -> SamplingParams:
    """Return what a model's makers advise, as vLLM reads it from `generation_config.json`.

    A value that no request may have is left out; `drafts`: where the engine speculates.
    """
    sampling = DEFAULT_SAMPLING
    for name in ("max_tokens", *ADVISABLE):
        if name not in advice or (drafts and name in NOT_WITH_DRAFTS):
            continue
        value = max(advice[name], 0) if name == "top_k" else advice[name]  # -1: all tokens
        try:
            advised = replace(sampling, **{name: value})
            check_sampling(advised)
        except InvalidRequestError as error:
            log.warning("advised_sampling_left_out", detail=str(error))
        else:
            sampling = advised
    return sampling


def blamed_parameter(error: Exception, sampling: SamplingParams) -> str:
    """Return the parameter that vLLM's complaint is about, where it names none itself; else "".

    What it does not name is what compiles a grammar.
    """
    is_named = getattr(error, "parameter", None)
    if is_named or sampling.structured_outputs is None:
        return ""
    return sampling.structured_outputs.parameter


def grammar_of(sampling: VllmSamplingParams) -> tuple[str, str] | None:
    """Return the kind and the text of the grammar that checked parameters make the engine compile;
    None for none.
    """
    if sampling.structured_outputs is None:
        return None
    kind, text = get_structured_output_key(sampling.structured_outputs)
    return kind.name.lower(), text


def is_of_any_object(grammar: tuple[str, str]) -> bool:
    """Return whether a grammar is one of those of any object, which are always the same."""
    kind, text = grammar
    return bool(kind == StructuredOutputOptions.JSON_OBJECT.name.lower() or text == ANY_OBJECT_TAG)


def describe_tokenizer(config: Any, tokenizer: Any) -> str:
    """Return the tokeniser in xgrammar's serialised form, as vLLM makes it for its engine.

    With special tokens: vLLM 0.33 leaves them out where no structural tag needs them.
    """
    backend = XgrammarBackend(config, tokenizer, config.model_config.get_vocab_size())
    compiler = getattr(backend, "full_vocab_compiler", backend.compiler)
    smallest = compiler.compile_grammar('root ::= ""')  # the compiler does not show it
    return str(smallest.tokenizer_info.serialize_json())


def to_vllm_outputs(outputs: StructuredOutputs | None) -> StructuredOutputsParams | None:
    if outputs is None:
        return None
    match outputs.form:
        case AnswerForm.JSON_OBJECT:
            return StructuredOutputsParams(json_object=True)
        case AnswerForm.CHOICE:
            return StructuredOutputsParams(choice=list(outputs.choices))
        case form:
            return StructuredOutputsParams(**{form.value: outputs.text})
