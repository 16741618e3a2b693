"""Asks an upstream server what it serves, and what it supports."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from services.worker.openai_engine.client import INVALID_JSON, UpstreamClient, message_of
from services.worker.openai_engine.completions import PATH
from services.worker.openai_engine.errors import UpstreamLost, UpstreamUnusable
from services.worker.openai_engine.metrics import COUNT_MAX, UpstreamLoad, read_metrics

MODELS_PATH = "/v1/models"
METRICS_PATH = "/metrics"
VERSION_PATH = "/version"
PROPS_PATH = "/props"
ANSWER_TIMEOUT_S = 10.0
TOKEN_TIMEOUT_S = 120.0
"""Time limit of the probe's token: servers compile kernels for their first request."""
PROBE_IDS, PROBE_TEXT = (0,), "a"
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "tideserve": "tideserve"}
_DENIED = (401, 403)
_OK = 200
_SERVER_ERROR = 500

log = logging.getLogger(__name__)


class UpstreamApi(StrEnum):
    """How a server takes prompts and returns output.

    `TOKEN_IDS`: `/v1/completions` with token ids both ways. `LLAMA_CPP`: llama.cpp's own
    `/completion`, the same. `TEXT`: `/v1/completions` with prompts of token ids, output as text.
    `TEXT_ONLY`: text both ways.
    """

    TOKEN_IDS = "token ids"
    LLAMA_CPP = "token ids by llama.cpp's API"
    TEXT = "text"
    TEXT_ONLY = "text, prompts too"


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """The settings of a worker that a probe reads.

    `model`: the model's name at the server, "" for the worker's `model_name` or the only model.
    Capacity that the server does not export is `kv_tokens`, or `max_running` requests of the
    longest length; `context_tokens` is the length if the server does not export it either.
    """

    model: str
    model_name: str
    kv_tokens: int | None
    max_running: int
    block_size: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class UpstreamFacts:
    """What an upstream server serves: `kind` of server, model, limits, and its `api`.

    `has_metrics`: it exports its load. `priorities`: it accepts vLLM's priorities. The KV cache has
    `kv_blocks` blocks of `block_size` tokens. `slots`: requests that it runs at once, 0 if they are
    not limited or not known.
    """

    kind: str
    version: str
    model: str
    max_model_len: int
    block_size: int
    kv_blocks: int
    api: UpstreamApi
    has_metrics: bool
    priorities: bool = False
    slots: int = 0

    @property
    def resumes(self) -> bool:
        """Whether the output of a request can continue after a loss: token ids are needed."""
        return self.api in (UpstreamApi.TOKEN_IDS, UpstreamApi.LLAMA_CPP)

    @property
    def class_fields(self) -> str:
        """The kind of server in whose form requests carry their class; "": they do not."""
        return self.kind if self.priorities or self.kind == "tideserve" else ""

    @property
    def summary(self) -> str:
        """A phrase for logs and status."""
        name = f"{self.kind} {self.version}".strip()
        return (
            f"{self.model} by {name} with up to {self.max_model_len} tokens per request,"
            f" {self.kv_blocks * self.block_size} tokens of KV cache, output as {self.api}"
        )

    def continues(self, earlier: "UpstreamFacts") -> bool:
        """Whether requests of a server with facts `earlier` can continue at this one."""
        return self._identity == earlier._identity

    @property
    def _identity(self) -> tuple[str, str, int, int, str, bool, int]:
        return (
            *(self.kind, self.model, self.max_model_len, self.block_size, self.api),
            *(self.priorities, self.slots),
        )


async def probe(client: UpstreamClient, options: ProbeOptions) -> UpstreamFacts:
    """The facts of the server that `client` calls; generates a token.

    Raises:
        UpstreamLost: if the server does not answer, or is not ready.
        UpstreamBusy: if it has no room for the token.
        UpstreamUnusable: if it denies access or cannot serve the model.
    """
    model = _model(await _models(client), options, client.url)
    load = await _load(client)
    kind = _OWNERS.get(str(model.get("owned_by")), "openai")
    props = await _json(client, PROPS_PATH) if kind == "llama.cpp" else {}
    slots = _whole(props.get("total_slots"))
    settings = props.get("default_generation_settings")
    own_length = _whole(settings.get("n_ctx")) if isinstance(settings, Mapping) else 0
    length = own_length or _whole(model.get("max_model_len")) or options.context_tokens
    block_size, blocks = _capacity(load, length, slots, options)
    if slots:
        api, priorities = UpstreamApi.LLAMA_CPP, False
    else:
        api, priorities = await _api(client, model["id"], kind)
    exported = load is not None and load.kv_blocks > 0
    if kind == "tideserve" and not exported and options.kv_tokens is None:
        log.warning(
            "%s exports no KV capacity in /metrics, so the worker assumes %d tokens; set"
            " 'cluster_metrics: true' at its gateway, or 'upstream_kv_tokens' at this worker",
            *(client.url, block_size * blocks),
        )
    version = props.get("build_info") or (await _json(client, VERSION_PATH)).get("version")
    return UpstreamFacts(
        kind=kind,
        version=str(version or ""),
        model=model["id"],
        max_model_len=length,
        block_size=block_size,
        kv_blocks=blocks,
        api=api,
        has_metrics=load is not None and load.running is not None,
        priorities=priorities,
        slots=slots,
    )


def _capacity(
    load: UpstreamLoad | None, length: int, slots: int, options: ProbeOptions
) -> tuple[int, int]:
    """Block size and number of blocks of the KV cache."""
    if load is not None and load.kv_blocks and options.kv_tokens is None:
        return load.block_size, load.kv_blocks
    tokens = options.kv_tokens or (slots or options.max_running) * length
    return options.block_size, max(1, tokens // options.block_size)


async def _models(client: UpstreamClient) -> list[dict[str, Any]]:
    status, content = await client.get(MODELS_PATH, ANSWER_TIMEOUT_S)
    if status in _DENIED:
        raise UpstreamUnusable(
            f"{client.url} denies access ({message_of(content)}); set 'upstream_key_file' to the"
            " file with its API key"
        )
    if status >= _SERVER_ERROR:
        raise UpstreamLost(f"{MODELS_PATH} of the upstream server answers with status {status}")
    try:
        models = msgspec.json.decode(content, type=dict[str, Any])["data"]
        usable = [model for model in models if isinstance(model["id"], str)]
    except (*INVALID_JSON, KeyError, TypeError) as error:
        raise UpstreamUnusable(
            f"{client.url}{MODELS_PATH} is not that of an OpenAI-compatible server (status"
            f" {status}); correct 'upstream_url'"
        ) from error
    return usable


def _model(models: list[dict[str, Any]], options: ProbeOptions, url: str) -> dict[str, Any]:
    """The model that the worker serves: the configured one, else that of its name, else the only.

    Raises:
        UpstreamUnusable: if the server does not have it, or several and none of the name.
    """
    by_id = {model["id"]: model for model in models}
    wanted = options.model or options.model_name
    if wanted in by_id:
        return by_id[wanted]
    if len(models) == 1 and not options.model:
        return models[0]
    listed = ", ".join(by_id) or "none"
    raise UpstreamUnusable(
        f"{url} has no model '{wanted}' but: {listed}; set 'upstream_model' to one of these"
    )


async def _load(client: UpstreamClient) -> UpstreamLoad | None:
    """The server's load; None if it does not export it."""
    status, content = await client.get(METRICS_PATH, ANSWER_TIMEOUT_S)
    if status != _OK:
        return None
    try:
        return read_metrics(content.decode(errors="replace"))
    except ValueError:
        return None


async def _json(client: UpstreamClient, path: str) -> dict[str, Any]:
    """The JSON object at `path`; empty if there is none."""
    status, content = await client.get(path, ANSWER_TIMEOUT_S)
    try:
        return msgspec.json.decode(content, type=dict[str, Any]) if status == _OK else {}
    except INVALID_JSON:
        return {}


def _whole(value: Any) -> int:
    return min(value, COUNT_MAX) if isinstance(value, int) and value > 0 else 0


async def _api(client: UpstreamClient, model: str, kind: str) -> tuple[UpstreamApi, bool]:
    """The server's API, and whether it accepts priorities; completes a prompt to find out.

    Raises:
        UpstreamUnusable: if it refuses all forms of prompts.
    """
    asked = {"model": model, "max_tokens": 1, "temperature": 0}
    with_ids = asked | {"prompt": list(PROBE_IDS)}
    forms = [
        *([with_ids | {"return_token_ids": True, "priority": 1}] if kind == "vllm" else []),
        with_ids | {"return_token_ids": True},
        with_ids,
        asked | {"prompt": PROBE_TEXT},
    ]
    for body in forms:
        status, answer = await client.post(PATH, body, TOKEN_TIMEOUT_S)
        if status >= _SERVER_ERROR:
            raise UpstreamLost(f"{PATH} of the upstream server answers with status {status}")
        if status == _OK:
            choices = answer.get("choices")
            choice = choices[0] if isinstance(choices, list) and choices else None
            if isinstance(choice, Mapping) and choice.get("token_ids"):
                return UpstreamApi.TOKEN_IDS, "priority" in body
            in_text = isinstance(body["prompt"], str)
            return UpstreamApi.TEXT_ONLY if in_text else UpstreamApi.TEXT, "priority" in body
    raise UpstreamUnusable(
        f"{client.url}{PATH} refuses a completion of a token (status {status}); use a server with"
        " OpenAI's completions API"
    )
