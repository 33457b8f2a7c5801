"""What the executor uses of vLLM is stated, and vLLM has it. An upgrade fails here first."""

import inspect
from pathlib import Path

import pytest

from lab.vllm_drift.findings import findings
from lab.vllm_drift.usage import overridden, unstated, where_used
from services.executor.vllm_seam.seam import SEAM
from services.executor.vllm_seam.stated import Stated

pytestmark = pytest.mark.filterwarnings("default")

POOL = "vllm.v1.core.block_pool:BlockPool"


def faults(*seam: Stated) -> dict[str, str]:
    return {found.name: found.fault for found in findings(seam) if found.fault}


@pytest.mark.parametrize("stated", SEAM, ids=lambda stated: stated.name)
def test_vllm_has_what_is_stated(stated: Stated) -> None:
    assert faults(stated) == {}


def test_every_name_that_is_used_is_stated() -> None:
    """One of another library, which vLLM has too: `OF_OTHERS` of `lab/vllm_drift/usage.py`."""
    assert unstated(SEAM) == {}


def test_every_name_that_is_stated_is_used() -> None:
    assert [stated.name for stated in SEAM if not where_used(stated)] == []


def test_methods_that_stand_in_for_vllms_are_stated_and_take_what_vllm_gives() -> None:
    named = {name for stated in SEAM for name in stated.overrides.split()}
    found = [one for one in overridden() if inspect.isfunction(getattr(one[0], one[2]))]

    assert len(found) > 50
    assert {name for _, _, name in found} <= named
    refused = [
        f"{ours.__name__}.{name}" for ours, theirs, name in found if not takes(ours, theirs, name)
    ]
    assert refused == []


def takes(ours: type, theirs: type, name: str) -> bool:
    """Return whether a method of ours takes all that vLLM's must be given, in its order or by name,
    and by name what it may be given.
    """
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(getattr(theirs, name)).parameters.values()
    named = {one.name: one.default is one.empty for one in parameters if one.kind not in many}
    needed = [name for name, is_needed in named.items() if is_needed]
    others = dict.fromkeys(name for name in named if name not in needed)
    method = inspect.signature(getattr(ours, name))
    return _binds(method, needed, others) or _binds(
        method, needed[:1], dict.fromkeys([*needed[1:], *others])
    )


def _binds(signature: inspect.Signature, given: list[str], by_name: dict[str, None]) -> bool:
    try:
        signature.bind(*given, **by_name)
    except TypeError:
        return False
    return True


# That the contract can fail.


@pytest.mark.parametrize(
    ("stated", "fault"),
    [
        (Stated("vllm.v1.no_such_module:Name"), "gone: No module named 'vllm.v1.no_such_module'"),
        (Stated("vllm.v1.core.block_pool:Gone"), "gone: vllm.v1.core.block_pool has no Gone"),
        (Stated(POOL, fields="no_such_field"), "gone"),
        (Stated(POOL, overrides="no_such_method"), "gone: ours is never called"),
        (Stated(POOL, calls=("no_such_method()",)), "gone"),
        (Stated(POOL, calls=("free_blocks(blocks)",)), "ordered_blocks is where blocks was"),
        (Stated(POOL, calls=("free_blocks()",)), "needs ordered_blocks"),
        (Stated(POOL, calls=("free_blocks(ordered_blocks, more)",)), "takes no more"),
        (Stated(POOL, calls=("free_blocks(ordered_blocks, *, more)",)), "takes no more"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_name_that_vllm_does_not_have_as_stated_is_a_fault(stated: Stated, fault: str) -> None:
    assert list(faults(stated).values()) == [fault]


def test_a_name_that_is_used_and_not_stated_is_found(tmp_path: Path) -> None:
    source = tmp_path / "new.py"
    source.write_text(
        "import torch\n"
        "from vllm.v1.core.sched.scheduler import Scheduler\n"
        "from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue\n"
        "def look(scheduler: Scheduler) -> object:\n"
        "    torch.cuda._lazy_init()\n"
        "    scheduler.kv_cache_manager.free(scheduler.requests['r'])\n"
        "    return scheduler._drain_deferred_frees(), getattr(scheduler, 'processed_step_seq')\n"
    )
    assert unstated(SEAM, [source]) == {
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": ["new.py"],
        "_drain_deferred_frees": ["new.py"],
        "processed_step_seq": ["new.py"],
    }


def test_a_name_that_the_seam_forgets_is_found() -> None:
    forgetful = [stated for stated in SEAM if stated.name != POOL]

    assert {POOL, "unpin_blocks", "get_new_blocks"} <= set(unstated(forgetful))
