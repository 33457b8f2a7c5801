"""Anchors where prompts end, of requests that go on: an agent's next turn may begin there.

It begins with this prompt, and often not with the answer as the model wrote it: templates write
calls anew and leave thoughts out. So what the next token attends to in windows and states is copied
before that token changes it, as at a turn's end (`turn_ends.py`). The request stands still
meanwhile, for a few steps behind the one that gives its first token. Full blocks are copied as
any request's are; requests can begin with the anchor once those are on the host.
"""

from collections.abc import Sequence
from dataclasses import replace

from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.residency import RequestKV, SideCopy, SideStage
from services.executor.blocks.transfers.turn_ends import anchor_at


class PromptEnds:
    """Has requests stand still where their prompts end, and makes anchors of what is copied.

    ends.stands(kv, prompt, is_drained=True)  # before each step, of a request that has just that
    ends.advance()  # before each step
    """

    def __init__(self, owner: BlockOwner) -> None:
        self._owner, self._copies, self._cache = owner, owner.side_copies, owner.host.cache

    def stands(self, kv: RequestKV, prompt: Sequence[int], *, is_drained: bool) -> bool:
        """Return whether a request that has computed its prompt, and no more, is not to go on yet.

        `is_drained`: no step of it is in flight.
        """
        if kv.prompt_copy is not None:
            return kv.prompt_copy.stage is SideStage.LEAVES
        num_full = len(prompt) // kv.block_size
        if not kv.mirrored or not 0 < num_full <= len(kv.keys):
            return False
        tokens = (*prompt[num_full * kv.block_size :],)
        if self._cache.anchors.has(kv.keys[num_full - 1], tokens):
            return False
        return not is_drained or self._copies.begin_prompt(kv, tokens)

    def advance(self) -> None:
        """Let requests begin where prompts ended that are on the host by now."""
        if not self._copies.are_needed:
            return
        for kv in self._owner.kvs:
            copy = kv.prompt_copy
            if copy is None or copy.stage is not SideStage.KEPT or copy.anchor is not None:
                continue
            anchor = anchor_at(kv, copy, self._cache)
            if anchor is not None and self._cache.anchors.publish(anchor):
                kv.prompt_copy = replace(copy, anchor=anchor)  # whose slots these are now
            elif anchor is not None:  # another request's was faster
                self._copies.drop_prompt(kv)
                kv.prompt_copy = SideCopy(num_tokens=copy.num_tokens, stage=SideStage.FAILED)
