"""How a request's tokens are drawn, as gateway and executor understand it. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from services.kit.errors import InvalidRequestError

MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0  # of presence and frequency, either way
MAX_REPETITION_PENALTY = 10.0
MAX_LOGIT_BIAS = 100.0  # either way
MAX_BIASED_TOKENS = 1_024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256  # of each; as much text is held back while it may be one
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256  # of each
MAX_ALLOWED_TOKENS = 1_024
MAX_LOGPROBS = 20
MAX_CHOICE_TEXTS = 1_024
MAX_FORM_CHARACTERS = 64 << 10  # of a schema, an expression, a grammar or all choices


class AnswerForm(Enum):
    """What an answer may be held to; the value is its name in vLLM."""

    JSON_SCHEMA = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What an answer must look like."""

    form: AnswerForm
    text: str = ""  # the schema (JSON), expression or grammar (EBNF)
    choices: tuple[str, ...] = ()  # for CHOICE: 1 to MAX_CHOICE_TEXTS, none empty

    @property
    def parameter(self) -> str:
        """Return the HTTP parameter that asks for this form."""
        is_json = self.form in (AnswerForm.JSON_SCHEMA, AnswerForm.JSON_OBJECT)
        return "response_format" if is_json else f"structured_outputs.{self.form.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; the defaults are OpenAI's."""

    max_tokens: int | None = None  # output tokens at most, >= 1; None: by the kind of prompt
    temperature: float = 1.0  # [0, MAX_TEMPERATURE], 0 is greedy
    top_p: float = 1.0  # (0, 1]
    stop: tuple[str, ...] = ()  # at most MAX_STOP_STRINGS of [1, MAX_STOP_CHARACTERS] characters
    seed: int | None = None  # signed 64 bit
    top_k: int = 0  # >= 0; 0: all tokens
    min_p: float = 0.0  # [0, 1], relative to the likeliest token
    presence_penalty: float = 0.0  # [-MAX_PENALTY, MAX_PENALTY]
    frequency_penalty: float = 0.0  # [-MAX_PENALTY, MAX_PENALTY]
    repetition_penalty: float = 1.0  # (0, MAX_REPETITION_PENALTY]; 1 changes nothing
    # Each in [-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS], by token id.
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    min_tokens: int = 0  # output tokens at least, >= 0, <= max_tokens
    stop_token_ids: tuple[int, ...] = ()  # at most MAX_STOP_TOKEN_IDS
    ignore_eos: bool = False
    logprobs: int | None = None  # likeliest tokens reported per token, [0, MAX_LOGPROBS]
    structured_outputs: StructuredOutputs | None = None
    bad_words: tuple[str, ...] = ()  # texts that the answer must not have, at most MAX_BAD_WORDS
    allowed_token_ids: tuple[int, ...] = ()  # the only ones, at most MAX_ALLOWED_TOKENS; (): all
    keep_special_tokens: bool = False  # in the answer's text
    include_stop: bool = False  # in the answer's text, the stop string that ended it


DEFAULT_SAMPLING = SamplingParams()
# What a model's makers advise beside max_tokens, in vLLM's names.
ADVISABLE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def check_sampling(params: SamplingParams, *, path: str = "") -> None:
    """Raise InvalidRequestError naming `path.name` for the first field out of its range.

    An empty path names the field alone. NaN is out of every range.
    """
    for name, holds, rule in (*_numbers(params), *_lists(params)):
        if not holds:
            fault = f"{path}.{name}" if path else name
            raise InvalidRequestError(f"{fault}: {rule}", field=fault)
    if params.structured_outputs is not None:
        _check_form(params.structured_outputs, path)


def _numbers(params: SamplingParams) -> Iterator[tuple[str, bool, str]]:
    """Yield (name, whether it is in range, the rule) for each number."""
    most = params.max_tokens
    yield "max_tokens", most is None or 1 <= most <= MAX_TOKENS, "must be >= 1"
    yield (
        "temperature",
        0 <= params.temperature <= MAX_TEMPERATURE,
        f"must be in [0, {MAX_TEMPERATURE:g}]",
    )
    yield "top_p", 0 < params.top_p <= 1, "must be in (0, 1]"
    yield "top_k", 0 <= params.top_k <= MAX_TOKEN_ID, "must be >= 0"
    yield "min_p", 0 <= params.min_p <= 1, "must be in [0, 1]"
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        yield (
            name,
            -MAX_PENALTY <= value <= MAX_PENALTY,
            f"must be in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]",
        )
    yield (
        "repetition_penalty",
        0 < params.repetition_penalty <= MAX_REPETITION_PENALTY,
        f"must be in (0, {MAX_REPETITION_PENALTY:g}]",
    )
    yield (
        "min_tokens",
        0 <= params.min_tokens <= (most or MAX_TOKENS),
        "must be >= 0 and at most max_tokens",
    )
    seed = params.seed
    yield "seed", seed is None or -(2**63) <= seed < 2**63, "must fit 64 bits with a sign"
    asked = params.logprobs
    yield "logprobs", asked is None or 0 <= asked <= MAX_LOGPROBS, f"must be in [0, {MAX_LOGPROBS}]"


def _lists(params: SamplingParams) -> Iterator[tuple[str, bool, str]]:
    """Yield (name, whether it is in range, the rule) for each collection."""
    yield (
        "stop",
        len(params.stop) <= MAX_STOP_STRINGS
        and all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in params.stop),
        f"must hold at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
    )
    ids = params.stop_token_ids
    yield (
        "stop_token_ids",
        len(ids) <= MAX_STOP_TOKEN_IDS and all(0 <= id <= MAX_TOKEN_ID for id in ids),
        f"must hold at most {MAX_STOP_TOKEN_IDS} token ids, each >= 0",
    )
    yield (
        "bad_words",
        len(params.bad_words) <= MAX_BAD_WORDS
        and all(1 <= len(word) <= MAX_BAD_WORD_CHARACTERS for word in params.bad_words),
        f"must hold at most {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_CHARACTERS} characters",
    )
    ids = params.allowed_token_ids
    yield (
        "allowed_token_ids",
        len(ids) <= MAX_ALLOWED_TOKENS and all(0 <= id <= MAX_TOKEN_ID for id in ids),
        f"must hold at most {MAX_ALLOWED_TOKENS} token ids, each >= 0",
    )
    bias = params.logit_bias
    yield (
        "logit_bias",
        len(bias) <= MAX_BIASED_TOKENS
        and all(0 <= id <= MAX_TOKEN_ID for id in bias)
        and all(-MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS for value in bias.values()),
        f"must give at most {MAX_BIASED_TOKENS} token ids (>= 0) a value in"
        f" [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]",
    )


def _check_form(outputs: StructuredOutputs, path: str) -> None:
    fault = f"{path}.structured_outputs" if path else outputs.parameter
    match outputs.form:
        case AnswerForm.JSON_OBJECT:
            return
        case AnswerForm.CHOICE:
            size = sum(map(len, outputs.choices))
            holds = 1 <= len(outputs.choices) <= MAX_CHOICE_TEXTS and all(outputs.choices)
            rule = f"must hold 1 to {MAX_CHOICE_TEXTS} texts, none empty"
        case _:
            size, holds, rule = len(outputs.text), bool(outputs.text.strip()), "must not be empty"
    if not holds:
        raise InvalidRequestError(f"{fault}: {rule}", field=fault)
    if size > MAX_FORM_CHARACTERS:
        rule = f"must have at most {MAX_FORM_CHARACTERS} characters"
        raise InvalidRequestError(f"{fault}: {rule}", field=fault)
