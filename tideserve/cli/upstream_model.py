"""Finds the model that the upstream servers of a cluster serve, and its tokenizer's folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.worker.upstream_url import UPSTREAM_KEY, is_upstream_url
from tideserve.cli.cache import cache_root
from tideserve.cli.client import HttpClient
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError
from tideserve.cli.model_folder import DUMMY, ModelUnavailable
from tideserve.cli.model_store import DEFAULT_MODEL_NAME, HUB_ID, prepare_default_model
from tideserve.cli.model_store import resolve_model as resolve


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """A model at a server: its `name` there, and where its files may come from.

    `everywhere`: all servers of the cluster list it under this name.
    """

    name: str
    sources: tuple[str, ...]
    everywhere: bool = False


def read_key(path: Path | None) -> str | None:
    """The API key in a file; None without a file. Raises CommandError."""
    if path is None:
        return None
    try:
        key = path.expanduser().read_text(errors="replace").strip()
    except OSError as error:
        raise CommandError(
            f"cannot read {path}, given as --upstream-key-file: {error.strerror}", EXIT_UNUSABLE
        ) from error
    if not UPSTREAM_KEY.fullmatch(key):
        raise CommandError(
            f"{path}, given as --upstream-key-file, is not a key in printable ASCII without spaces"
            " and line breaks; write only the key into it",
            EXIT_UNUSABLE,
        )
    return key


def upstream_model(urls: Sequence[str], key: str | None, wanted: str | None) -> UpstreamModel:
    """The model `wanted`, or the only model, of the servers in `urls` that answer.

    Raises:
        CommandError: if a URL is malformed, if no server answers, if a server has several models
            and none is `wanted`, or if servers have different models.
    """
    for url in urls:
        if not is_upstream_url(url):
            raise CommandError(
                f"--upstream '{url}' is not the address of a server without a path and a password;"
                " write it as http://HOST:PORT, without /v1, and set --upstream-key-file for a key",
                EXIT_UNUSABLE,
            )
    chosen = {url: model for url in urls if (model := _served(url, key, wanted)) is not None}
    if not chosen:
        raise CommandError(
            f"no upstream server answers at {', '.join(urls)}; start one, or correct --upstream"
        )
    (first_url, first), *others = chosen.items()
    for url, model in others:
        # Servers of GGUF files show the path of the file.
        if not {Path(source).name for source in model.sources} & {
            Path(source).name for source in first.sources
        }:
            raise CommandError(
                f"{url} serves {model.name}, but {first_url} serves {first.name}; start a cluster"
                " for each model",
                EXIT_UNUSABLE,
            )
    everywhere = len(chosen) == len(set(urls)) and {m.name for m in chosen.values()} == {first.name}
    return replace(first, everywhere=everywhere)


def _served(url: str, key: str | None, wanted: str | None) -> UpstreamModel | None:
    """The model of a server; None if it does not answer. Raises CommandError."""
    with HttpClient(url, key) as client:
        response = client.probe("/v1/models")
        if response is None:
            return None
        if response.is_error:
            raise CommandError(
                f"{url}/v1/models answers with status {response.status_code}; correct"
                " --upstream, or set --upstream-key-file",
                EXIT_UNUSABLE,
            )
        return _chosen(client.get_json("/v1/models"), wanted, url)


def _chosen(listed: Any, wanted: str | None, url: str) -> UpstreamModel:
    models = listed.get("data") if isinstance(listed, dict) else None
    named = {
        model["id"]: model
        for model in (models if isinstance(models, list) else [])
        if isinstance(model, dict) and isinstance(model.get("id"), str)
    }
    if wanted not in named and len(named) != 1:
        raise CommandError(
            f"{url} serves {', '.join(named) or 'no model'}; choose one with --upstream-model",
            EXIT_UNUSABLE,
        )
    name = wanted if wanted in named else next(iter(named))
    assert name is not None
    return UpstreamModel(name, tuple(dict.fromkeys((str(named[name].get("root") or name), name))))


def model_folder(model: UpstreamModel, report: Callable[[str], None]) -> Path:
    """The folder with config.json and the tokenizer of a model; weights are not needed.

    Raises:
        ModelUnavailable: if none of its sources is a folder, the default model or a hub id.
    """
    for source in model.sources:
        if Path(source).is_dir() or HUB_ID.fullmatch(source):
            return resolve(source, cache_root(), report, DUMMY)
        # Servers of GGUF files show the path of the file.
        if Path(source).name.startswith(DEFAULT_MODEL_NAME):
            return prepare_default_model(cache_root(), report)
    raise ModelUnavailable(
        f"The upstream server serves {model.name}, which is neither a folder here nor a hub id."
        " Pass the hub id of the model, or the folder with its config.json and tokenizer.json, with"
        " --model."
    )
