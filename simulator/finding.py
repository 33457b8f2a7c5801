"""Where a model is described: a name of ours, a directory, a config.json, or a hub id."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.device.hardware import model, model_names
from simulator.models.reading import read_model
from simulator.models.types import Model

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CONFIG = "config.json"


def find_model(given: str) -> Model:
    """Return the model that a name, a path or a hub id stands for.

    Of a hub id the config alone is read, from Hugging Face's cache, else from the hub unless
    HF_HUB_OFFLINE is set. Raises ValueError, in a sentence, where there is none, or none that says
    enough.
    """
    if given in model_names():
        return model(given)
    path = Path(given).expanduser()
    if path.is_dir():
        path /= CONFIG
    if path.is_file():
        return read_model(_parsed(path), name=_name_of(path), source=str(path))
    if not HUB_ID.fullmatch(given):
        raise ValueError(
            f"{given!r} is no model: neither one of {', '.join(model_names())}, nor a directory "
            f"with a {CONFIG}, nor such a file, nor a hub id (owner/name)"
        )
    found = _from_hub(given)
    return read_model(_parsed(found), name=given, source=f"{given} {CONFIG}")


def _name_of(path: Path) -> str:
    path = path.resolve()
    return path.parent.name if path.name == CONFIG else path.stem


def _parsed(path: Path) -> Mapping[str, Any]:
    try:
        whole = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(whole, dict):
        raise ValueError(f"{path} is no {CONFIG} of a model")
    return whole


def _from_hub(hub_id: str) -> Path:
    try:
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise ValueError(f"{hub_id!r} is no path, and hub ids need huggingface_hub") from error
    cached = try_to_load_from_cache(hub_id, CONFIG)
    if isinstance(cached, str):
        return Path(cached)
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"the config of {hub_id} is not in {constants.HF_HUB_CACHE}, "
            "and HF_HUB_OFFLINE forbids to download it: give a directory or a config.json"
        )
    try:
        return Path(hf_hub_download(hub_id, CONFIG))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"the config of {hub_id} cannot be downloaded: {reason}") from error
