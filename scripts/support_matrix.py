"""The tables of docs/support.md: engines, models, APIs, and the groups that merge."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fastapi.routing import APIRoute

from services.common.errors import ConfigError
from services.common.setting import settings_of
from services.core.engine_kind import EngineKind
from services.gateway.http import batches_routes, messages, openai, operations, tokens
from services.gateway.tools.format import ReasoningFormat, ToolFormat
from services.worker.config import DEVICES, WorkerConfig
from services.worker.engine.model.activations import ACTIVATIONS
from services.worker.engine.model.config import FAMILIES
from services.worker.engine.model.rope import ROPE_TYPES
from tideserve.gateway.v1 import gateway_pb2
from tideserve.kserve.v2 import inference_pb2

Line = Sequence[str]
MODELS = {
    EngineKind.TIDESERVE: f"{len(FAMILIES)} architectures, see below",
    EngineKind.VLLM: "text generation, as supported by vLLM",
    EngineKind.OPENAI: "text generation, as served there; needs its tokenizer here",
}
STATES = {
    (EngineKind.TIDESERVE, "cpu"): "tested",
    (EngineKind.TIDESERVE, "cuda"): "first version: has run on an H200, see [gpus](gpus.md)",
    (EngineKind.VLLM, "cpu"): "tested",
    (EngineKind.VLLM, "cuda"): "not run yet",
}
UPSTREAM_STATE = "see [upstreams](upstreams.md)"
MERGES = (
    ("workers of tideserve's engine on CPUs", "merge and split"),
    (
        "workers of tideserve's engine on GPUs",
        "first version: two workers have merged and split on one H200",
    ),
    ("workers with vLLM or in front of upstream servers", "never"),
    ("one worker", "never: a merge needs two"),
    ("workers of different models, dtypes, builds or kinds of device", "never with each other"),
    ("workers without the packages of UCX", "never"),
    (
        "all workers with `--overload-policy recompute`, `migrate` or `swap`",
        "only manually: `tideserve drop`",
    ),
    ("all workers with `--overload-policy static-pipeline`", "each once, in pairs, at the start"),
)
INTRODUCTION = (
    "Not supported: tensor parallelism, quantized weights, draft models, mixtures of experts,"
    " images and other media, embeddings, weights in other files than safetensors,"
    " adapters (LoRA) except with vLLM (docs/adapters.md).\n\n"
    "Written by hand: the line above, models and states of engines, and the table of groups"
    " that merge; all other cells are generated from the code."
)


def engines() -> list[Line]:
    """A line per engine and device, and a line for upstream servers."""
    upstream = EngineKind.OPENAI
    own = [kind for kind in EngineKind if kind is not upstream]
    server = ("the server's", "the server's")
    lines: list[Line] = [
        (
            *(f"`{kind}`", f"`{device}`", ", ".join(_dtypes(kind))),
            *(MODELS[kind], STATES[kind, device]),
        )
        for kind in own
        for device in DEVICES
    ]
    return [*lines, (f"`{upstream}`", *server, MODELS[upstream], UPSTREAM_STATE)]


def _dtypes(kind: EngineKind) -> Iterator[str]:
    """The dtypes that the configuration of a worker with the engine accepts."""
    python = None if kind is EngineKind.TIDESERVE else Path("python")
    for dtype in settings_of(WorkerConfig)["dtype"].metadata["options"]:
        other: dict[str, Any] = {"engine": kind, "engine_python": python, "dtype": dtype}
        try:
            WorkerConfig(etcd_url="", model_name="m", model_dir=Path(), memory_bytes=1, **other)
        except ConfigError:
            continue
        yield f"`{dtype}`"


def families() -> list[Line]:
    """A line per architecture of tideserve's engine."""
    lines: list[Line] = []
    for name, family in sorted(FAMILIES.items()):
        windows = "per layer" if family.windows_by_layer else "all layers"
        biases = family.biases
        named = [part for part in biases._fields if getattr(biases, part)] if biases else []
        lines.append(
            (
                f"`{name}`",
                ", ".join(named) or "none" if biases is not None else "as config.json says",
                "queries and keys" if family.head_norms else "none",
                windows if family.has_windows else "none",
            )
        )
    return lines


def parts() -> list[Line]:
    """Supported features named by the files of a model."""
    return [
        ("activations", _listed(ACTIVATIONS)),
        ("types of RoPE", _listed(ROPE_TYPES)),
        ("tool calls of the chat template", _listed(set(ToolFormat) - {ToolFormat.NONE})),
        ("reasoning of the chat template", _listed(set(ReasoningFormat) - {ReasoningFormat.NONE})),
    ]


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def http_routes() -> list[Line]:
    """A line per route of the gateway's public port, with the first sentence of its description."""
    part = cast(Any, SimpleNamespace(models=SimpleNamespace(only=None)))
    part.metrics, part.refuse_unknown, part.client_stall_s = None, False, 1.0
    routers = (
        ("OpenAI", openai.router(part, part)),
        *(("OpenAI", router) for router in batches_routes.routers(part, part, part)),
        ("Anthropic", messages.router(part, part)),
        ("vLLM", tokens.router(part, part)),
        ("tideserve", operations.router(part, part, part, part, False, lambda: 0)),
    )
    return [
        (api, f"`{' '.join(sorted(route.methods or ()))} {route.path}`", _first_sentence(route))
        for api, router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
    ]


def _first_sentence(route: APIRoute) -> str:
    return " ".join(route.description.split()).partition(". ")[0].rstrip(".") + "."


def grpc_methods() -> list[Line]:
    """A line per client-facing gRPC service of the gateway."""
    services = (
        ("tideserve", gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]),
        ("KServe", inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]),
    )
    return [
        (api, f"`{service.full_name}`", ", ".join(rpc.name for rpc in service.methods))
        for api, service in services
    ]
