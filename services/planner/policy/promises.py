"""Which promises to readers a plan can keep at all."""

from dataclasses import replace

from services.placement.judging.slo import promise_of
from services.placement.step_time.batch import predicted_step_s
from services.placement.step_time.patterns import RESIDENT
from services.placement.types import RequestState, Snapshot


def without_hopeless(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without SLOs that nothing could keep: they bind nobody.

    An SLO is hopeless if a step with this request alone, all of its KV in the pool, takes longer.
    Whoever states one gains nothing by it, and costs no other reader a pause.
    """
    requests = tuple(
        replace(request, slo_tbt_s=None, slo_tpot_s=None)
        if _is_hopeless(request, snapshot)
        else request
        for request in snapshot.requests
    )
    return snapshot if requests == snapshot.requests else replace(snapshot, requests=requests)


def _is_hopeless(request: RequestState, snapshot: Snapshot) -> bool:
    promise = promise_of(request, deposit=False)
    if promise is None:
        return False
    return promise.interval_s < predicted_step_s(snapshot, [(request, RESIDENT)])
