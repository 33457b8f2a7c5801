"""What `evenflow serve` may be given: vLLM's engine options under vLLM's names, and ours.

Importing this takes seconds: it imports vLLM.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import human_readable_int

from cli.local.settings import NOT_IN_NAMES, BadSettingError
from cli.parser import NearestNameParser
from services.executor.engine.options import OURS as NOT_THE_USERS
from services.executor.engine.options import check_grammar_backend
from services.executor.settings import ExecutorSettings
from services.placement.presets import PRESETS, loadable

DESCRIPTION = """\
Serve MODEL, a checkpoint's directory or a hub id: executor, planner, tracker, gateway and Redis,
until Ctrl-C. vLLM's engine options have vLLM's names; --help=Evenflow lists ours."""
PREFIX = "EVENFLOW_EXECUTOR_"
# Options of ours whose setting has another name, or is another service's.
SETTINGS = {
    "host": "EVENFLOW_GATEWAY_HOST",
    "api_key_file": "EVENFLOW_GATEWAY_API_KEYS_FILE",
    "kv_host_memory": f"{PREFIX}KV_HOST_MEMORY_BYTES",
}
PORTS = {"port": "EVENFLOW_GATEWAY_HTTP_PORT", "grpc_port": "EVENFLOW_GATEWAY_GRPC_PORT"}
DTYPES = {"half": "float16", "float": "float32"}  # vLLM's short names
FIT_TO_POOL = -1  # what vLLM's parser makes of `--max-model-len auto`


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """One command line, read."""

    model: str  # directory or hub id
    variables: dict[str, str] = field(default_factory=dict)  # settings of services
    ports: dict[str, int] = field(default_factory=dict)  # by the settings' names
    redis_url: str | None = None
    name: str | None = None  # of the stack
    dtype: str = "auto"
    detach: bool = False


def read_options(arguments: Sequence[str], environ: Mapping[str, str]) -> ServeOptions:
    """Read a command line; one that is wrong ends the process as argparse does.

    Raises BadSettingError for what Evenflow cannot do.
    """
    parser = _make_parser()
    given = vars(parser.parse_args(list(arguments)))
    model = given.pop("model_tag", None) or given.pop("model", None)
    model = model or environ.get(f"{PREFIX}MODEL")
    if not model:
        raise BadSettingError("name a model: `evenflow serve MODEL`")
    if taken := sorted(NOT_THE_USERS.intersection(given)):
        raise BadSettingError(f"--{taken[0].replace('_', '-')}: Evenflow sets it itself")
    try:
        check_grammar_backend(given)
    except ValueError as error:
        raise BadSettingError(f"--{str(error).replace('_', '-')}") from None
    ports = {PORTS[name]: given.pop(name) for name in PORTS if name in given}
    redis_url, detach = given.pop("redis_url", None), given.pop("detach", False)
    name = given.pop("name", None)
    defaults = {f"{PREFIX}ENFORCE_EAGER": "true"} if runs_on_cpu() else {}  # compiling: minutes
    return ServeOptions(
        model=model,
        ports=ports,
        redis_url=redis_url,
        name=name,
        detach=detach,
        dtype=given.get("dtype", "auto"),
        variables={
            **{name: value for name, value in defaults.items() if name not in environ},
            f"{PREFIX}MODEL": str(Path(model).absolute()) if Path(model).is_dir() else model,
            **_variables(parser, given),
        },
    )


def runs_on_cpu() -> bool:
    """Return whether the engine's device is the CPU."""
    return bool(current_platform.is_cpu())


class _Parser(NearestNameParser):
    """Remembers how each option was written."""

    def __init__(self, **options: Any) -> None:
        self.written: dict[str, list[str]] = {}
        super().__init__(**options)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        values = super()._get_values(action, arg_strings)
        names = action.option_strings
        if isinstance(action, argparse.BooleanOptionalAction):
            names = []  # said by its value
        self.written[action.dest] = [*names[-1:], *arg_strings]
        return values


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="evenflow serve",
        usage="evenflow serve MODEL [options]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="directory or hub id")
    _add_ours(parser)
    AsyncEngineArgs.add_cli_args(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # only what is given travels; defaults stay vLLM's
    return parser


def _add_ours(parser: argparse.ArgumentParser) -> None:
    ours = parser.add_argument_group("Evenflow", "The gateway, layer-wise KV, the local stack.")
    ours.add_argument("--host", help="address that the gateway listens on; 127.0.0.1")
    ours.add_argument("--port", type=_port, help="of the OpenAI API; 8000")
    ours.add_argument("--grpc-port", type=_port, help="of the gRPC API; 50050")
    ours.add_argument("--name", type=_name, help="of the stack; the model's")
    ours.add_argument("--api-key-file", type=_file, help="TOML (docs/operations.md); none")
    ours.add_argument("--redis-url", help="a Redis in place of the embedded one")
    ours.add_argument(
        "--layerwise-kv",
        action=argparse.BooleanOptionalAction,
        help="keep part of a running request's KV in host memory, layer by layer",
    )
    ours.add_argument(
        "--kv-host-memory",
        type=human_readable_int,
        help="bytes of host memory for KV, of each worker; twice its pool",
    )
    ours.add_argument(
        "--policy",
        type=_policy,
        help="what decides who runs and where KV is: "
        f"{', '.join(PRESETS)}, or a preset as module:attribute",
    )
    ours.add_argument("--tool-call-parser", help="vLLM's name of the model's form of calls")
    ours.add_argument(
        "--detach", action="store_true", help="return when ready; `evenflow down` stops the stack"
    )


def _variables(parser: _Parser, given: Mapping[str, Any]) -> dict[str, str]:
    """Return settings of services; options without one go to the engine as they were written."""
    variables, further = {}, list[str]()
    for name, value in given.items():
        if name in SETTINGS:
            variables[SETTINGS[name]] = str(value)
        elif name in ExecutorSettings.model_fields:
            variables[f"{PREFIX}{name.upper()}"] = _setting(name, value)
        elif parser.written[name][:1] == []:
            further.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
        else:
            further += parser.written[name]
    if further:
        variables[f"{PREFIX}ENGINE_ARGS"] = json.dumps(further)
    return variables


def _setting(name: str, value: Any) -> str:
    """Return a parsed value as the environment has it. Raises BadSettingError."""
    if name == "served_model_name":
        if len(value) > 1:
            raise BadSettingError("--served-model-name: one name, not several")
        return str(value[0])
    if name == "max_model_len" and value == FIT_TO_POOL:
        return "auto"
    if name == "dtype":
        return DTYPES.get(value, str(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _policy(text: str) -> str:
    try:
        return loadable(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f'"{text}" is not a port from 1 to 65535')
    return int(text)


def _name(text: str) -> str:
    if NOT_IN_NAMES.search(text) or not text.strip("."):
        raise argparse.ArgumentTypeError(f'"{text}": a name has a to z, 0 to 9, ".", "_" and "-"')
    return text


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text).absolute()
