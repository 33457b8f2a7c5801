"""How an engine of several nodes does not come about."""

from services.kit.settings import BAD_SETTINGS_EXIT_CODE

LOST_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h: the engine, or a node of it


class NodesError(Exception):
    """Nodes do not become one engine. `exit_code`: of the processes that hear of it."""

    exit_code = LOST_EXIT_CODE


class NodesMissingError(NodesError):
    """A node has not come in time."""


class NodesDifferError(NodesError):
    """Nodes do not fit together."""

    exit_code = BAD_SETTINGS_EXIT_CODE
