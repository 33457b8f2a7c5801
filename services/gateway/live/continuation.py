"""What another executor needs to go on with an answer, and how it went on so far."""

import math
from array import array
from collections.abc import Sequence

from msgspec.structs import replace

from services.gateway import metrics
from services.gateway.errors import GenerationFailedError
from services.gateway.types import Begun, Continued, Resume, Token
from services.pacing.attainment import DELIVERY_TOLERANCE_S
from services.pacing.cause import Cause, Delay


class Continuation:
    """Of one answer. Ids take 4 bytes each; above a bound they are let go of, and the answer stays
    where it is.
    """

    def __init__(self, max_kept_tokens: int, begun: Begun | None = None) -> None:
        """Keep the ids of so many tokens at most; 0: of none. An executor tells those of `begun`
        again.
        """
        self._max_kept_tokens = max_kept_tokens
        self._begun: Sequence[int] = () if begun is None else begun.token_ids
        self._num_delivered = 0 if begun is None else begun.num_delivered
        self._delivered: list[Token] = []  # that were told again, and not taken
        self._ids = array("i")
        self._num_tokens = 0
        self._overlap = array("i")  # ids that the next tokens must have
        self.max_tokens = 0  # that the whole answer may have; 0: not known
        self.prompt_digest = 0
        self.moves = 0
        self.continued = Continued.IDENTICAL
        self.begun_s: float | None = None  # when its present executor's first own token came
        self.gap_since_s: float | None = None  # since when it has no executor, until tokens come

    @property
    def is_complete(self) -> bool:
        """Say whether all ids are here."""
        return len(self._ids) == self._num_tokens

    def overlap(self, num_tokens: int) -> None:
        """Have the next executor generate so many of the last tokens again: all but the first at
        most. It must come to the same ones.
        """
        num_ids = 0 if self._num_tokens < len(self._begun) else len(self._ids)
        self._overlap = self._ids[num_ids - min(num_tokens, max(0, num_ids - 1)) : num_ids]

    @property
    def overlaps(self) -> bool:
        """Say whether the next tokens are to be compared with those that are here."""
        return bool(self._overlap)

    def without_overlap(self, tokens: Sequence[Token]) -> Sequence[Token]:
        """Return those of the next tokens that are not here yet. Raises GenerationFailedError for
        one that differs from the one that is.
        """
        num_again = min(len(tokens), len(self._overlap))
        expected, self._overlap = self._overlap[:num_again], self._overlap[num_again:]
        for token, token_id in zip(tokens, expected, strict=False):
            if token.id != token_id:
                raise GenerationFailedError(
                    f"the executor that went on with the answer came to token {token.id} where it "
                    f"has {token_id}"
                )
        return tokens[num_again:]

    def add(self, tokens: Sequence[Token], generated_s: float) -> Sequence[Token]:
        """Take in the next tokens. Returns those that the client has not got already."""
        num_before, was_complete = self._num_tokens, self.is_complete
        self._num_tokens = num_tokens = num_before + len(tokens)
        if self.begun_s is None and num_tokens > len(self._begun):
            self.begun_s = generated_s
        if was_complete:
            if num_tokens > self._max_kept_tokens:
                self._ids = array("i")
            else:
                for token in tokens:
                    self._ids.append(token.id)
        if num_before >= self._num_delivered:
            return tokens
        num_old = self._num_delivered - num_before
        self._delivered.extend(tokens[:num_old])
        return tokens[num_old:]

    def take_delivered(self) -> Sequence[Token]:
        """Return the tokens that the client has got already, once: what comes after depends on
        them. All are here before any other.
        """
        delivered, self._delivered = self._delivered, []
        return delivered

    def forget(self) -> None:
        """Begin again without any token."""
        self._ids, self._num_tokens, self._delivered = array("i"), 0, []
        self._overlap = array("i")

    def moved(self, how: Continued) -> None:
        """Take in that another executor has the answer, or its own again."""
        self.moves += 1
        if how is Continued.VALID:
            self.continued = how

    def end_gap(
        self, tokens: Sequence[Token], generated_s: float, runs_dry_s: float
    ) -> Sequence[Token]:
        """Note that tokens come again, `runs_dry_s` being when the reader has read those before;
        infinite: none is read. Returns them; the first is late by the gap.
        """
        since_s, self.gap_since_s = self.gap_since_s, None
        assert since_s is not None
        gap_s = generated_s - since_s
        metrics.MOVE_GAP_SECONDS.observe(gap_s)
        if generated_s <= runs_dry_s + DELIVERY_TOLERANCE_S and runs_dry_s < math.inf:
            metrics.MOVES_HIDDEN.inc()
        first, *others = tokens
        return [replace(first, delay=Delay(Cause.FAILOVER, gap_s)), *others]

    def resume(
        self, *, num_delivered: int, last_due_age_s: float, arrived_age_s: float
    ) -> Resume | None:
        """Return what hands the answer over; None: there is nothing of it yet."""
        num_retold = max(0, len(self._begun) - self._num_tokens)
        if not self._num_tokens and not num_retold:
            return None
        num_kept = len(self._ids) - len(self._overlap)
        return Resume(
            output_ids=self._begun if num_retold else self._ids[:num_kept],
            num_retold_tokens=num_retold,
            max_tokens=self.max_tokens,
            num_delivered_tokens=num_delivered if num_retold else min(num_delivered, num_kept),
            last_due_age_s=last_due_age_s,
            arrived_age_s=arrived_age_s,
            prompt_digest=self.prompt_digest,
        )
