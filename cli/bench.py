"""`evenflow bench`: vLLM's serving benchmark with readers, and what these felt."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from cli.client.endpoint import AnswerError, Endpoint
from cli.client.felt import DEFINITIONS, felt_by_rate, num_untimed
from cli.client.felt_view import after_thoughts, felt_table
from cli.local.settings import BadSettingError
from cli.local.stacks import NoStackError, running_stacks, some_stack
from cli.readers import ENDPOINTS, Readers, readers_in_benchmark
from services.pacing.attainment import DELIVERY_TOLERANCE_S
from services.pacing.types import ServiceLevel

DESCRIPTION = """\
vLLM's `vllm bench serve`, with readers: each request is sent with a reading rate or an SLO, and a
second table says what its reader felt. Takes vLLM's options under vLLM's names. Without any it
sends 16 short prompts to the local stack, one a second."""
EPILOG = "--help=all lists every option, --help=Evenflow ours, --help=NAME those with that name."
DEFAULT_RATES_TPS = (8.0, 12.0, 16.0)
# vLLM's own sends 1,000 prompts of 1,024 tokens at once, to completions.
DEFAULTS = {
    "backend": "openai-chat",
    "endpoint": None,
    "host": None,
    "port": None,
    "num_prompts": 16,
    "random_input_len": 128,
    "random_output_len": 64,
    "request_rate": None,
    "temperature": 0.0,
}
DEFAULT_REQUESTS_PER_S = 1.0
MISSING_PACKAGES = "a package is missing; `pip install pandas datasets` brings what data sets need"


@click.command("bench", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """vLLM's serving benchmark, with readers."""
    try:
        is_answered = run(arguments)
    except (AnswerError, BadSettingError, NoStackError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if not is_answered:
        raise click.ClickException("no request was answered")


def run(arguments: Sequence[str]) -> bool:
    """Run one benchmark, print its tables, say whether any request was answered.

    Imports vLLM, which takes seconds. Raises AnswerError, BadSettingError, NoStackError,
    ValueError or OSError.
    """
    # PyTorch's remark that a machine without a GPU has no Triton.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    parser = _make_parser()
    args = parser.parse_args(list(arguments))
    levels = _levels(args, parser)
    _complete(args)
    readers = Readers(levels, args.backend)
    with readers_in_benchmark(readers, args.backend, lambda: _report(readers, levels)):
        _run_vllms(args)
    return bool(readers.heard)


def _run_vllms(args: argparse.Namespace) -> None:
    from vllm.benchmarks import serve

    try:
        serve.main(args)
    except ImportError as error:
        raise ValueError(f"--dataset-name {args.dataset_name}: {MISSING_PACKAGES}") from error
    except AssertionError as error:  # how vLLM says that options do not go together
        raise ValueError(str(error)) from error


def _make_parser() -> Any:
    from vllm.benchmarks.serve import add_cli_args

    from cli.parser import NearestNameParser

    parser = NearestNameParser(
        prog="evenflow bench",
        usage="evenflow bench [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    ours = parser.add_argument_group("Evenflow", "What readers are promised.")
    ours.add_argument(
        "--reading-rates",
        type=_rates,
        metavar="R,R,...",
        help="tokens per second that readers read, dealt to requests in turn; 0: no pace. "
        "8,12,16 unless a TBT or TPOT SLO is given",
    )
    for name, meaning in {
        "ttft": "time to first token",
        "tbt": "largest gap between two tokens",
        "tpot": "mean time per output token after the first",
    }.items():
        ours.add_argument(f"--slo-{name}-ms", type=_positive, metavar="MS", help=meaning)
    ours.add_argument("--name", help="the local stack's; needed where several run")
    add_cli_args(parser)
    parser.set_defaults(**DEFAULTS)
    return parser


def _levels(args: argparse.Namespace, parser: Any) -> list[ServiceLevel]:
    """Return what each reader in turn is promised; ends the process if it cannot be kept."""
    rates: Sequence[float] | None = args.reading_rates
    if rates is None:
        is_bounded = args.slo_tbt_ms is not None or args.slo_tpot_ms is not None
        rates = (0.0,) if is_bounded else DEFAULT_RATES_TPS
    if args.slo_tbt_ms is not None and any(rate and 1e3 / rate > args.slo_tbt_ms for rate in rates):
        parser.error("--slo-tbt-ms: a reader of --reading-rates reads slower than that")
    return [
        ServiceLevel(
            consumption_rate_tps=rate or None,
            pace_tail=bool(rate),
            slo_ttft_s=_seconds(args.slo_ttft_ms),
            slo_tbt_s=_seconds(args.slo_tbt_ms),
            slo_tpot_s=_seconds(args.slo_tpot_ms),
        )
        for rate in rates
    ]


def _complete(args: argparse.Namespace) -> None:
    """Fill in what was not said. Raises AnswerError, BadSettingError, NoStackError, ValueError."""
    if args.backend not in ENDPOINTS:
        raise ValueError(f"--backend {args.backend}: readers need one of {', '.join(ENDPOINTS)}")
    args.endpoint = args.endpoint or ENDPOINTS[args.backend]
    args.base_url = _base_url(args)
    if args.model is None:
        args.model = _first_model(args)
    if args.tokenizer is None and not args.skip_tokenizer_init:
        args.tokenizer = _tokenizer(args)
    if args.request_rate is None:
        # These have a pace of their own.
        is_paced = (
            args.ramp_up_strategy or args.max_concurrency or args.dataset_name == "timed_trace"
        )
        args.request_rate = float("inf") if is_paced else DEFAULT_REQUESTS_PER_S


def _base_url(args: argparse.Namespace) -> str:
    from vllm.utils.network_utils import join_host_port

    if args.base_url:
        return str(args.base_url).rstrip("/").removesuffix("/v1")
    if args.host is None and args.port is None:
        return some_stack(args.name).base_url
    return f"http://{join_host_port(args.host or '127.0.0.1', args.port or 8000)}"


def _first_model(args: argparse.Namespace) -> str:
    from vllm.benchmarks.lib.endpoint_request_func import _get_headers

    headers = {**_get_headers(), **dict(item.split("=", 1) for item in args.header or ())}
    models = Endpoint(base_url=args.base_url, headers=headers).models()
    if not models:
        raise AnswerError(f"{args.base_url} serves no model yet")
    return models[0]


def _tokenizer(args: argparse.Namespace) -> str:
    """Return the directory or hub id of the model's tokenizer."""
    for stack in running_stacks():
        if stack.base_url == args.base_url:
            return stack.model
    if "/" in args.model or Path(args.model).is_dir():
        return str(args.model)
    raise ValueError(
        f"--tokenizer: name the directory or hub id of {args.model}'s tokenizer; {args.base_url} "
        "is no local stack, whose model is known"
    )


def _report(readers: Readers, levels: Sequence[ServiceLevel]) -> dict[str, Any]:
    """Print what the readers felt, and return it for the result file."""
    rows, untimed = felt_by_rate(readers.heard), num_untimed(readers.heard)
    notes = []
    if rows and rows[-1].num_thoughts:
        notes.append(after_thoughts(rows[-1]))
    if untimed:
        num_tokens = sum(one.num_tokens for one in readers.heard)
        notes.append(f"{untimed} of {num_tokens} tokens had no event of their own: not counted.")
    if readers.failures:
        notes.append(f"{len(readers.failures)} failed; the first: {readers.failures[0]}")
    print(felt_table(rows, notes))
    return {
        "definitions": dict(DEFINITIONS),
        "tolerance_s": DELIVERY_TOLERANCE_S,
        "promised": [asdict(level) for level in levels],
        "num_untimed_tokens": untimed,
        "felt": [asdict(row) for row in rows],
    }


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 <= rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f'"{text}" is no list of tokens per second, as 8,12,16')
    return rates


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f'"{text}" is no time > 0 in milliseconds')
    return value


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
