"""Attention metadata that was built for the first layer group of a step, for its other groups."""

from typing import Any, Generic, TypeVar

MetadataT = TypeVar("MetadataT")


class StepMemo(Generic[MetadataT]):
    """Remembers one step's metadata, by all that metadata of a kind of group depends on."""

    def __init__(self) -> None:
        # With the tensors of its step, which are kept, so that their identity stands for the step.
        self._built: tuple[tuple[Any, ...], tuple[Any, ...], MetadataT] | None = None

    def find(self, common: Any, kind: Any) -> MetadataT | None:
        """Return what was kept of the same step; None if nothing was.

        `common`: vLLM's metadata of the step; `kind`: equal for groups that may share.
        """
        if self._built is None:
            return None
        step, extents, metadata = self._built
        is_same = all(a is b for a, b in zip(_step(common), step, strict=True))
        return metadata if is_same and extents == _extents(common, kind) else None

    def keep(self, common: Any, kind: Any, metadata: MetadataT) -> None:
        """Remember what was built in place of what was before."""
        self._built = _step(common), _extents(common, kind), metadata


def _step(common: Any) -> tuple[Any, ...]:
    return common.query_start_loc, common.seq_lens, common.causal


def _extents(common: Any, kind: Any) -> tuple[Any, ...]:
    return (
        kind,
        common.num_reqs,
        common.num_actual_tokens,
        common.max_query_len,
        common.max_seq_len,
    )
