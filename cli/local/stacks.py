"""The stacks of this user on this machine: which there are, and where a new one goes."""

import fcntl
import json
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cli.local.preflight import PreflightError, is_free
from cli.local.settings import TRACKER, StackSettings, read_settings, state_dir

RECORD = "*/started_with.json"
FREE_PORTS = range(10_000, 18_000)  # below what Linux gives to outgoing connections
HTTP = "EVENFLOW_GATEWAY_HTTP_PORT"
EXECUTOR_PORTS = ("EVENFLOW_EXECUTOR_GRPC_PORT", "EVENFLOW_EXECUTOR_METRICS_PORT")


class NoStackError(Exception):
    """There is no such stack, or more than one; the message is for the user."""


def running_stacks(folder: Path | None = None) -> list[StackSettings]:
    """Return the stacks whose supervisord lives; of others the record is removed."""
    running = []
    for record in sorted((folder or state_dir()).glob(RECORD)):
        settings = _recorded(record)
        if settings and _is_listening(settings.supervisor_socket):
            running.append(settings)
        else:
            record.unlink(missing_ok=True)
    return running


def only_stack(name: str | None) -> StackSettings | None:
    """Return the stack of that name, or without a name the one that runs; None if none runs.

    Raises NoStackError.
    """
    running = running_stacks()
    named = [one for one in running if name in (None, one.name)]
    if len(named) == 1:
        return named[0]
    if named:
        raise NoStackError(f"several stacks run here; --name says which:\n{_table(named)}")
    if name is not None:
        others = f"; these do:\n{_table(running)}" if running else ""
        raise NoStackError(f"no stack {name} runs here{others}")
    return None


def some_stack(name: str | None) -> StackSettings:
    """Return the same, or where none runs the settings of the environment. Raises NoStackError."""
    return only_stack(name) or read_settings()


def one_more_executor(stack: StackSettings) -> StackSettings:
    """Return the settings of another executor for a stack that runs, with ports and an id of its
    own. Raises NoStackError if the stack's gateway would not find it.
    """
    executors = stack.environment()["EVENFLOW_GATEWAY_EXECUTORS"]
    if TRACKER not in executors.split(","):
        raise NoStackError(
            f"the gateway of the stack {stack.name} has the executors {executors} and looks for no "
            f"others: start it with EVENFLOW_GATEWAY_EXECUTORS={TRACKER}"
        )
    ports = dict(stack.ports)
    for variable in EXECUTOR_PORTS:
        ports[variable] = _free_port(set(ports.values()))
    own = {
        "EVENFLOW_EXECUTOR_ID": f"{socket.gethostname()}-{ports[EXECUTOR_PORTS[0]]}",
        "EVENFLOW_EXECUTOR_ADVERTISED_ADDRESS": "",  # where it listens
    }
    return stack.having(own, ports=ports)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """While the block runs, no other process places a stack there. Raises PreflightError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise PreflightError(
            f"{folder} cannot be written ({error.strerror}): EVENFLOW_STATE_DIR names another "
            "directory for what stacks leave"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def placed(settings: StackSettings) -> StackSettings:
    """Return settings with a name and ports that no other stack has.

    One that runs already, with this name or with this model at this address, is met where it is.
    Raises PreflightError if the address of the API is another stack's.
    """
    running = running_stacks(settings.state_dir)
    settings = replace(settings, stated_name=_free_name(settings, running))
    before = next((one.ports for one in running if one.name == settings.name), {})
    others = [one for one in running if one.name != settings.name]
    settings = _with_ports(settings, before, others)
    for other in others:
        if other.ports[HTTP] == settings.ports[HTTP]:
            raise PreflightError(
                f"port {other.ports[HTTP]} is that of the stack {other.name}, which serves "
                f"{other.model_id}: --port gives this one another, "
                f"`evenflow down --name {other.name}` stops that one"
            )
    return settings


def _free_name(settings: StackSettings, running: Sequence[StackSettings]) -> str:
    """Return the stated name, that of the stack that is meant, or one that no other stack has."""
    if settings.stated_name:
        return settings.stated_name
    port = settings.ports[HTTP]
    for one in running:
        if (one.model, one.ports[HTTP]) == (settings.model, port):
            return one.name
    is_taken = any(one.name == settings.name for one in running)
    return f"{settings.name}-{port}" if is_taken else settings.name


def _with_ports(
    settings: StackSettings, before: dict[str, int], others: Sequence[StackSettings]
) -> StackSettings:
    """Return settings with ports that are its own; `before`: those that it has by now.

    Stated ports stay, and so does that of the API. The first stack has the well-known ones.
    """
    taken = {port for one in others for port in one.ports.values()}
    taken.update(settings.ports[name] for name in settings.stated_ports if name in settings.ports)
    ports = {}
    for variable, port in settings.ports.items():
        if variable not in settings.stated_ports:
            port = before.get(variable, port)
            is_fixed = variable == HTTP or variable in before
            is_usable = not others and port not in taken and is_free(port)
            port = port if is_fixed or is_usable else _free_port(taken)
        taken.add(port)
        ports[variable] = port
    return replace(settings, ports=ports, stated_ports=frozenset(ports))


def _free_port(taken: set[int]) -> int:
    for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
        if port not in taken and is_free(port):
            return port
    raise PreflightError(f"no port from {FREE_PORTS[0]} to {FREE_PORTS[-1]} is free")


def _recorded(record: Path) -> StackSettings | None:
    """Return what a stack was started with; None if the record is not whole."""
    try:
        settings = read_settings(json.loads(record.read_text()))
    except (OSError, ValueError):
        return None
    return replace(settings, state_dir=record.parents[1], stated_name=record.parent.name)


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _table(stacks: Sequence[StackSettings]) -> str:
    width = max(len(one.name) for one in stacks)
    return "\n".join(f"  {one.name:{width}}  {one.model_id} at {one.base_url}" for one in stacks)
