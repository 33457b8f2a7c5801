"""What a conversation's options say to a chat template that does not read it."""

import json
from collections.abc import Collection
from dataclasses import replace

from services.gateway.left_out.members import note
from services.generation.conversation import EFFORT_VARIABLES, ConversationOptions


def without_unread(
    options: ConversationOptions, known: Collection[str], names: set[str]
) -> ConversationOptions:
    """Return checked options without what a template that reads the `known` variables would not
    see; add what is left out to `names`, as chat calls it. Nothing is where none are known.
    """
    if not known:
        return options
    if options.reasoning_effort and EFFORT_VARIABLES.isdisjoint(known):
        options = replace(options, reasoning_effort="")
        note(names, "", "reasoning_effort")
    stated = json.loads(options.template_variables or "{}")
    unread = stated.keys() - known
    if not unread:
        return options
    for name in sorted(unread):
        note(names, "chat_template_kwargs.", name)
    kept = {name: value for name, value in stated.items() if name in known}
    text = json.dumps(kept, ensure_ascii=False) if kept else ""
    return replace(options, template_variables=text)
