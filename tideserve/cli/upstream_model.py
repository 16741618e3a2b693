"""Finds the model that the upstream servers of a cluster serve, and its tokenizer's folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.config import UPSTREAM_URL
from tideserve.cli.cache import cache_root
from tideserve.cli.client import HttpClient
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError
from tideserve.cli.model_folder import DUMMY, ModelUnavailable
from tideserve.cli.model_store import DEFAULT_MODEL_NAME, HUB_ID, prepare_default_model
from tideserve.cli.model_store import resolve_model as resolve


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """A model at a server: its `name` there, and where its files may come from."""

    name: str
    sources: tuple[str, ...]


def read_key(path: Path | None) -> str | None:
    """The API key in a file; None without a file. Raises CommandError."""
    if path is None:
        return None
    try:
        return path.expanduser().read_text().strip()
    except OSError as error:
        raise CommandError(
            f"cannot read {path}, given as --upstream-key-file: {error.strerror}", EXIT_UNUSABLE
        ) from error


def upstream_model(urls: Sequence[str], key: str | None, wanted: str | None) -> UpstreamModel:
    """The model `wanted`, or the only model, of the first server in `urls` that answers.

    Raises:
        CommandError: if a URL is malformed, if no server answers, or if the server has several
            models and none is `wanted`.
    """
    for url in urls:
        if not UPSTREAM_URL.fullmatch(url):
            raise CommandError(
                f"--upstream '{url}' is not the address of a server without a path and a password;"
                " write it as http://HOST:PORT, without /v1, and set --upstream-key-file for a key",
                EXIT_UNUSABLE,
            )
    for url in urls:
        with HttpClient(url, key) as client:
            response = client.probe("/v1/models")
            if response is None:
                continue
            if response.is_error:
                raise CommandError(
                    f"{url}/v1/models answers with status {response.status_code}; correct"
                    " --upstream, or set --upstream-key-file",
                    EXIT_UNUSABLE,
                )
            return _chosen(client.get_json("/v1/models"), wanted, url)
    raise CommandError(
        f"no upstream server answers at {', '.join(urls)}; start one, or correct --upstream"
    )


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
