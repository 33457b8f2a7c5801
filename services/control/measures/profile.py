"""The engine's times as measured while it runs.

Like is compared with like: decode figures come from decode steps only, the time of a prompt's
token from steps with a prompt. The shape of a layer's time over the batch is learnt slowly, its
level within a few steps, so that a device that slows down is noticed before its shape is known.
"""

from services.control.measures.fits import ChunkFit, NonNegativeFit
from services.control.types import ScheduledStep, StepSample
from services.placement.run.resume import PromptCost
from services.placement.run.types import StepCosts
from services.placement.types import Profile

MIN_DECODE_STEPS = 4  # before there is a profile
REFIT_STEPS = 32
REFIT_PREFILLS = 8
LEVEL_WEIGHT = 0.25  # of the newest step in a layer's level
MEAN_WEIGHT = 0.1  # of the newest step in other means
MIN_PREFILL_TOKENS = 16  # fewer say little about a prompt's time


class OnlineProfile:
    """Sums of measured steps; a `Profile` of them on demand."""

    def __init__(self, *, num_layers: int) -> None:
        self._num_layers = num_layers
        self._fit = NonNegativeFit()
        self._shape = (0.0, 0.0, 0.0)
        self._level = 1.0  # measured over fitted
        self._num_decode_steps = 0
        self.rows_per_request = 1.0  # that decodes: its next token and its drafts, mean
        self._outside_s = 0.0
        self._tpot_s = 0.0
        self._prefill_s_per_token = 0.0
        self._prefill_context = 0.0  # tokens that a prompt's token attends to, mean
        self._prompts = NonNegativeFit()
        self._num_prefills, self._pair_s = 0, 0.0
        self._chunks = ChunkFit()

    @property
    def is_ready(self) -> bool:
        return self._num_decode_steps >= MIN_DECODE_STEPS

    @property
    def tpot_s(self) -> float | None:
        """The length of a decode step, mean; None before the first."""
        return self._tpot_s or None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """How fast prompts are computed; None before the first."""
        return 1.0 / self._prefill_s_per_token if self._prefill_s_per_token else None

    @property
    def prompt_cost(self) -> PromptCost | None:
        """What a prompt's tokens take, by what they attend to; None before the first."""
        if not self._prefill_s_per_token:
            return None
        token_s = max(0.0, self._prefill_s_per_token - self._pair_s * self._prefill_context)
        return PromptCost(token_s=token_s, pair_s=self._pair_s)

    def num_decodes(self, step: StepSample | ScheduledStep) -> float:
        """Return how many requests decode in a step, by its rows: their drafts are no requests."""
        return (step.num_tokens - step.num_prefill_tokens) / self.rows_per_request

    def add(self, sample: StepSample) -> None:
        """Take in one step; steps whose layers were not measured say nothing."""
        if sample.layer_s <= 0.0 or sample.step_s <= 0.0:
            return
        if sample.num_prefill_tokens:
            self._add_prefill(sample)
        else:
            self._add_decode(sample)

    def _add_decode(self, sample: StepSample) -> None:
        self._num_decode_steps += 1
        first = self._num_decode_steps == 1
        self._fit.add(sample.num_tokens, sample.num_context_tokens, sample.layer_s)
        fitted_s = self._fitted_s(sample)
        if fitted_s > 0.0:
            self._level += LEVEL_WEIGHT * (sample.layer_s / fitted_s - self._level)
        if self._num_decode_steps <= MIN_DECODE_STEPS or not self._num_decode_steps % REFIT_STEPS:
            self._refit(sample)
        weight = 1.0 if first else MEAN_WEIGHT
        if sample.num_requests:
            rows = sample.num_tokens / sample.num_requests
            self.rows_per_request += weight * (rows - self.rows_per_request)
        self._tpot_s += weight * (sample.step_s - self._tpot_s)
        layers_s = self._num_layers * sample.layer_s
        outside_s = max(0.0, sample.step_s - layers_s - sample.stall_s)
        self._outside_s += weight * (outside_s - self._outside_s)

    def _refit(self, sample: StepSample) -> None:
        """Take the newest shape; the level goes on from where it was at this sample."""
        level_s = self._level * self._fitted_s(sample)
        self._shape = self._fit.solve()
        fitted_s = self._fitted_s(sample)
        self._level = level_s / fitted_s if level_s > 0.0 and fitted_s > 0.0 else 1.0

    def _fitted_s(self, sample: StepSample) -> float:
        base, per_token, per_context = self._shape
        return base + per_token * sample.num_tokens + per_context * sample.num_context_tokens

    def _add_prefill(self, sample: StepSample) -> None:
        if sample.num_prefill_tokens < MIN_PREFILL_TOKENS:
            return
        costs = self.costs()
        if costs is not None:
            decode_s = costs.decode_s(self.num_decodes(sample), sample.num_context_tokens)
            extra_s = max(0.0, sample.step_s - sample.stall_s - decode_s)
            self._chunks.add(sample.num_prefill_tokens, extra_s)
        decodes = sample.num_tokens > sample.num_prefill_tokens
        prompt_s = max(0.0, sample.step_s - sample.stall_s - (self._tpot_s if decodes else 0.0))
        per_token_s = prompt_s / sample.num_prefill_tokens
        weight = MEAN_WEIGHT if self._prefill_s_per_token else 1.0
        self._prefill_s_per_token += weight * (per_token_s - self._prefill_s_per_token)
        context = sample.num_prefill_pairs / sample.num_prefill_tokens
        self._prefill_context += weight * (context - self._prefill_context)
        self._add_pairs(sample, prompt_s)

    def _add_pairs(self, sample: StepSample, prompt_s: float) -> None:
        """Learn what a pair takes: a prompt's time over its tokens and over its pairs."""
        self._num_prefills += 1
        self._prompts.add(sample.num_prefill_tokens, sample.num_prefill_pairs, prompt_s)
        if self._num_prefills <= REFIT_PREFILLS or not self._num_prefills % REFIT_PREFILLS:
            most_s = self._prefill_s_per_token / max(1.0, self._prefill_context)
            self._pair_s = min(self._prompts.solve()[2], most_s)

    def costs(self) -> StepCosts | None:
        """Return a step by its parts; None before enough decode steps."""
        if not self.is_ready:
            return None
        base, per_token, per_context = (
            self._num_layers * self._level * part for part in self._shape
        )
        chunk_base_s, chunk_token_s = self._chunks.solve()
        return StepCosts(
            outside_s=self._outside_s,
            base_s=self._outside_s + max(1e-9, base),
            token_s=per_token * self.rows_per_request,
            context_s=per_context,
            chunk_base_s=chunk_base_s,
            chunk_token_s=chunk_token_s,
        )

    def profile(self) -> Profile | None:
        """Return the profile of this moment; None before enough decode steps."""
        if not self.is_ready:
            return None
        base, per_token, per_context = self._shape
        return Profile(
            outside_layers_s=self._outside_s,
            layer_base_s=max(1e-9, base * self._level),
            layer_s_per_token=per_token * self._level * self.rows_per_request,
            layer_s_per_context_token=per_context * self._level,
            prefill_s_per_token=self._prefill_s_per_token,
            mean_tpot_s=self._tpot_s,
        )
