"""`evenflow keys`: API keys in the document that gateways read; new ones are hashed."""

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import click
import redis
from redis.client import Pipeline

from services.gateway.access.api_keys import ApiKey, hashed, parse_api_keys
from services.gateway.access.key_sources import REDIS_KEY, REDIS_TIMEOUT_S
from services.kit.redis_url import open_redis_blocking

HEADER = "[[keys]]"
Change = Callable[[str], str]  # from the document as it is to the one that shall be


class _Place:
    """Where the document is: a file, or Redis."""

    def __init__(self, file: Path | None, redis_url: str | None) -> None:
        if (file is None) == (redis_url is None):
            raise click.UsageError("name one place of keys: --file or --redis-url")
        self._file = file
        self._redis_url = redis_url

    def read(self) -> str:
        """Return the document, empty if there is none."""
        if self._file is not None:
            return self._file.read_text("utf-8") if self._file.exists() else ""
        return _text(self._client().get(REDIS_KEY))

    def write(self, change: Change) -> None:
        """Change the document, whole or not at all."""
        if self._file is not None:
            _replace(self._file, change(self.read()))
            return

        def changed(pipe: Pipeline) -> None:
            text = change(_text(pipe.get(REDIS_KEY)))
            pipe.multi()
            pipe.set(REDIS_KEY, text)

        self._client().transaction(changed, REDIS_KEY)  # again if another process changes it

    def _client(self) -> redis.Redis:
        return open_redis_blocking(str(self._redis_url), timeout_s=REDIS_TIMEOUT_S)


def _text(value: Any) -> str:
    return bytes(value or b"").decode()


def _replace(file: Path, text: str) -> None:
    """Write a file that only its owner may read, unless it is there already and others may."""
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    with NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as new:
        new.write(text)
    os.chmod(new.name, mode)
    os.replace(new.name, file)


def _entries(document: str) -> list[ApiKey]:
    """Return the keys. Raises ClickException for a document with a fault."""
    try:
        return list(parse_api_keys(document)) if document.strip() else []
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def added(document: str, name: str, secret: str, limits: dict[str, Any]) -> str:
    """Return the document with one more key, hashed; what is there stays as it is written.

    Raises ClickException if the name is taken.
    """
    if name in {key.name for key in _entries(document)}:
        raise click.ClickException(f'there is a key with the name "{name}"')
    entry = {"name": name, "key": hashed(secret), **limits}
    lines = [f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in entry.items()]
    before = f"{document.rstrip()}\n\n" if document.strip() else ""
    longer = before + "\n".join([HEADER, *lines]) + "\n"
    _entries(longer)
    return longer


def revoked(document: str, name: str) -> str:
    """Return the document without a key; what else is there stays as it is written.

    Raises ClickException if there is no such key, or no other one: without keys anybody may call.
    """
    names = [key.name for key in _entries(document)]
    if name not in names:
        raise click.ClickException(f'there is no key with the name "{name}"')
    if len(names) == 1:
        raise click.ClickException("this is the last key, and gateways need one: add another first")
    head, *tables = document.split(HEADER)
    index = names.index(name)
    shorter = HEADER.join([head, *tables[:index], *tables[index + 1 :]])
    if [key.name for key in _entries(shorter)] != names[:index] + names[index + 1 :]:
        raise click.ClickException("the keys are not written as tables: take it out by hand")
    return shorter


@click.group("keys")
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="EVENFLOW_GATEWAY_API_KEYS_FILE",
    help="where they are; $EVENFLOW_GATEWAY_API_KEYS_FILE",
)
@click.option(
    "--redis-url",
    envvar="EVENFLOW_GATEWAY_API_KEYS_REDIS_URL",
    help="where they are; $EVENFLOW_GATEWAY_API_KEYS_REDIS_URL",
)
@click.pass_context
def command(context: click.Context, file: Path | None, redis_url: str | None) -> None:
    """API keys of the gateways, which see a change within seconds."""
    context.obj = _Place(file, redis_url)


@command.command("add")
@click.argument("name")
@click.option("--max-live-requests", type=click.IntRange(min=1), help="at a time")
@click.option("--tokens-per-minute", type=click.IntRange(min=1), help="prompt and output")
@click.option("--min-slo-ttft-s", type=float, help="tightest time to first token")
@click.option("--min-slo-tpot-s", type=float, help="tightest mean time per token")
@click.option("--min-slo-tbt-s", type=float, help="tightest time between tokens")
@click.option("--priorities", type=(int, int), help="least and greatest of its requests")
@click.option("--admin", is_flag=True, default=None, help="it may see what all keys' requests do")
@click.pass_obj
def add(place: _Place, /, name: str, **limits: Any) -> None:
    """Make a key and show it, this once: only its hash is kept."""
    secret = f"sk-{secrets.token_urlsafe(32)}"
    stated = {field: value for field, value in limits.items() if value is not None}
    place.write(lambda document: added(document, name, secret, stated))
    click.echo(secret)


@command.command("list")
@click.pass_obj
def list_(place: _Place) -> None:
    """Show names and limits."""
    for key in _entries(place.read()):
        limits = key.model_dump(exclude={"name", "key"}, exclude_defaults=True)
        click.echo(" ".join([key.name, *(f"{field}={value}" for field, value in limits.items())]))


@command.command("revoke")
@click.argument("name")
@click.pass_obj
def revoke(place: _Place, name: str) -> None:
    """Take a key out; its requests that run go on."""
    place.write(lambda document: revoked(document, name))
