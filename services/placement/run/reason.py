"""Why a request runs, waits, or was sent away."""

from enum import Enum


class Reason(Enum):
    """Given to each request by each decision; `text` says it to a user."""

    # It runs.
    STAYS = "stays"
    FITS = "fits"
    PROMISED = "promised"
    DUE = "due"
    BACK = "back"
    ALONE = "alone"
    TURN = "turn"
    # It leaves.
    OUTGROWN = "outgrown"
    GAVE_PLACE = "gave_place"
    YIELDED = "yielded"
    OTHERS_TURN = "others_turn"
    # It waits.
    IN_HAND = "in_hand"
    NO_ROOM = "no_room"
    BEHIND = "behind"
    PROMPTS = "prompts"
    LESS_URGENT = "less_urgent"
    TOO_LARGE = "too_large"
    # A policy that says no more than what becomes of it.
    RUN = "run"
    SENT = "sent"
    NOT_NAMED = "not_named"
    # Not the run policy's.
    QUEUE = "queue"
    LOADING = "loading"
    WAKING = "waking"
    READER = "reader"
    PLAN = "plan"

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Reason.STAYS: "no other request needs its blocks more",
    Reason.FITS: "it fits beside the others",
    Reason.PROMISED: "the pool can serve its reader beside the others",
    Reason.DUE: "its reader would soon have lacked a token",
    Reason.BACK: "there was room for it to come back",
    Reason.ALONE: "no other request runs",
    Reason.TURN: "larger than the pool: it has its turn, alone",
    Reason.OUTGROWN: "the batch outgrew the pool, and this one could best be spared",
    Reason.GAVE_PLACE: "its reader has tokens in hand: another request took its place",
    Reason.YIELDED: "more urgent requests need its blocks",
    Reason.OTHERS_TURN: "a request that is larger than the pool has its turn",
    Reason.IN_HAND: "its reader has tokens in hand",
    Reason.NO_ROOM: "there is no room for it yet",
    Reason.BEHIND: "it stands behind a request that there is no room for",
    Reason.PROMPTS: "as many prompts are computed as readers make room for",
    Reason.LESS_URGENT: "more urgent requests wait for room",
    Reason.TOO_LARGE: "larger than the pool: it waits for its turn",
    Reason.RUN: "the run policy lets it run",
    Reason.SENT: "the run policy sent it to the queue",
    Reason.NOT_NAMED: "the run policy lets others run",
    Reason.QUEUE: "first come, first served",
    Reason.LOADING: "its KV is on its way to the pool",
    Reason.WAKING: "it lacks blocks to run on, or a token of it is in flight",
    Reason.READER: "its reader has stopped",
    Reason.PLAN: "the plan in force pauses it",
}
