"""A leader's process is not started as a follower, nor the other way round."""

import pytest

from services.executor.app import require_leader
from services.executor.follower.app import require_follower
from services.executor.settings import ExecutorSettings
from services.kit.settings import BAD_SETTINGS_EXIT_CODE


def settings_of(rank: int) -> ExecutorSettings:
    return ExecutorSettings(
        model="m",
        tensor_parallel_size=3,
        nodes=3,
        node_rank=rank,
        leader_address="10.0.0.1:50051",
    )


def test_each_rank_has_its_process() -> None:
    require_leader(settings_of(0))
    require_leader(ExecutorSettings(model="m"))
    require_follower(settings_of(2))


@pytest.mark.parametrize(
    ("require", "rank", "sentence"),
    [
        (require_leader, 1, "1 is a follower, `python -m services.executor.follower`"),
        (require_follower, 0, "0 is the leader, `python -m services.executor`"),
    ],
)
def test_the_other_process_is_named(
    require: object, rank: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        require(settings_of(rank))  # type: ignore[operator]

    assert caught.value.code == BAD_SETTINGS_EXIT_CODE
    assert f"EVENFLOW_EXECUTOR_NODE_RANK: {sentence}" in capsys.readouterr().err
