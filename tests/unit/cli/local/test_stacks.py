"""Several stacks of one user: each is found by its name, and none takes what is another's."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.local.preflight import PreflightError
from cli.local.settings import PORTS, StackSettings, read_settings
from cli.local.stacks import (
    EXECUTOR_PORTS,
    NoStackError,
    one_more_executor,
    only_stack,
    placed,
    running_stacks,
    some_stack,
)
from cli.main import main
from lab.stack.ports import free_port

Run = Callable[..., StackSettings]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVENFLOW_STATE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def run() -> Iterator[Run]:
    """Record stacks that run, as far as anybody can see: something listens on their socket."""
    with ExitStack() as cleanup:

        def record(name: str, port: int, model: str = "org/Some-Model") -> StackSettings:
            settings = replace(wanted(port, model), stated_name=name)
            write_record(settings)
            listener = cleanup.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(settings.supervisor_socket))
            listener.listen()
            return settings

        yield record


def wanted(port: int, model: str = "org/Some-Model", **environ: str) -> StackSettings:
    read = read_settings({"EVENFLOW_EXECUTOR_MODEL": model, **environ})
    found = replace(read, state_dir=read_settings().state_dir)
    return found.having({}, ports={"EVENFLOW_GATEWAY_HTTP_PORT": port})


def write_record(settings: StackSettings) -> None:
    settings.run_dir.mkdir()
    environment = settings.environment()
    record = {k: v for k, v in environment.items() if k.startswith("EVENFLOW_")}
    settings.state_file.write_text(json.dumps(record))


def test_a_stack_is_found_with_what_it_was_started_with(run: Run) -> None:
    started = run("mine", 8123)

    found = only_stack(None)

    assert found is not None
    assert (found.name, found.base_url, found.model, found.run_dir) == (
        "mine",
        "http://127.0.0.1:8123",
        "org/Some-Model",
        started.run_dir,
    )


def test_a_record_without_a_supervisor_is_removed(folder: Path) -> None:
    write_record(settings := wanted(8123))

    assert running_stacks() == []
    assert not settings.state_file.exists()
    assert only_stack(None) is None


def test_several_are_listed_with_model_and_address_until_a_name_says_which(run: Run) -> None:
    run("first", 8123), run("second", 8124, "org/Other")

    with pytest.raises(NoStackError) as error:
        only_stack(None)

    assert "--name" in str(error.value)
    assert "first   Some-Model at http://127.0.0.1:8123" in str(error.value)
    assert "second  Other at http://127.0.0.1:8124" in str(error.value)
    assert some_stack("second").base_url == "http://127.0.0.1:8124"


def test_a_name_that_no_stack_has_is_answered_with_those_there_are(run: Run) -> None:
    run("first", 8123)

    with pytest.raises(NoStackError, match=r"no stack other runs here(.|\n)*first"):
        only_stack("other")


def test_the_address_of_another_stack_is_refused_with_what_to_do(run: Run) -> None:
    run("first", port := free_port())

    with pytest.raises(PreflightError, match=r"the stack first, .*Some-Model: --port .*--name"):
        placed(wanted(port, "org/Other"))


def test_a_stack_beside_another_has_ports_that_no_other_has(run: Run) -> None:
    run("first", free_port())

    second = placed(wanted(port := free_port(), "org/Other"))

    assert second.name == "other"
    assert second.ports["EVENFLOW_GATEWAY_HTTP_PORT"] == port
    assert len(set(second.ports.values())) == len(PORTS)
    assert set(second.ports.values()).isdisjoint(PORTS.values())


def test_a_stated_port_stays(run: Run) -> None:
    run("first", free_port())

    second = placed(wanted(free_port(), EVENFLOW_TRACKER_GRPC_PORT="50053"))

    assert second.ports["EVENFLOW_TRACKER_GRPC_PORT"] == 50053


def test_a_second_stack_of_the_same_model_is_named_after_its_port_too(run: Run) -> None:
    run("some-model", free_port())

    assert placed(wanted(port := free_port())).name == f"some-model-{port}"


def test_the_same_model_at_the_same_address_is_the_same_stack(run: Run) -> None:
    first, _ = run("mine", port := free_port()), run("other", free_port())

    again = placed(wanted(port))

    assert (again.name, again.ports) == ("mine", first.ports)


def test_the_address_of_a_named_stack_that_runs_stays_unless_another_is_stated(run: Run) -> None:
    run("mine", port := free_port())
    unstated = replace(wanted(8000), stated_name="mine", stated_ports=frozenset())

    assert placed(unstated).ports["EVENFLOW_GATEWAY_HTTP_PORT"] == port


@pytest.mark.parametrize("command", ["watch", "logs"])
def test_without_a_stack_commands_say_how_to_start_one(command: str) -> None:
    answer = CliRunner().invoke(main, [command])

    assert answer.exit_code == 1
    assert "no stack runs here: `evenflow serve MODEL` starts one" in answer.output


@pytest.mark.parametrize("command", ["watch", "logs", "down", "chat"])
def test_with_several_stacks_commands_ask_which(command: str, run: Run) -> None:
    run("first", 8123), run("second", 8124)

    answer = CliRunner().invoke(main, [command])

    assert answer.exit_code == 1
    assert "several stacks run here; --name says which" in answer.output


def test_the_version_is_the_packages() -> None:
    answer = CliRunner().invoke(main, ["--version"], prog_name="evenflow")

    assert answer.output.split()[0] == "evenflow"
    assert answer.output.split()[1][0].isdigit()


def test_one_more_executor_has_the_settings_of_the_first_but_ports_and_id(run: Run) -> None:
    run("mine", 8123)
    found = only_stack(None)
    assert found is not None

    first, second = found.environment(), one_more_executor(found).environment()

    own = {"EVENFLOW_EXECUTOR_ID", "EVENFLOW_EXECUTOR_ADVERTISED_ADDRESS", *EXECUTOR_PORTS}
    differs = {name for name in {*first, *second} if first.get(name) != second.get(name)}
    assert differs == own
    assert second["EVENFLOW_EXECUTOR_ADVERTISED_ADDRESS"] == ""
    assert (
        len({first[name] for name in EXECUTOR_PORTS} | {second[name] for name in EXECUTOR_PORTS})
        == 4
    )


def test_an_executor_joins_no_stack_that_would_not_find_it(run: Run) -> None:
    run("mine", 8123)
    found = only_stack(None)
    assert found is not None
    listed = found.having({"EVENFLOW_GATEWAY_EXECUTORS": "127.0.0.1:1,127.0.0.1:2"})

    with pytest.raises(NoStackError, match=r"mine has the executors 127\.0\.0\.1:1,"):
        one_more_executor(listed)


def test_an_executor_joins_nothing_where_nothing_runs() -> None:
    answer = CliRunner().invoke(main, ["join"])

    assert answer.exit_code == 1
    assert "no stack runs here: `evenflow serve MODEL` starts one" in answer.output
