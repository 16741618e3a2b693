"""The page docs/vllm-flags.md: which setting of tideserve stands for a flag of `vllm serve`."""

from collections.abc import Iterator

import typer
from typer.core import TyperGroup

from services.common.setting import settings_of
from tideserve.cli.cluster_options import CONFIGS
from tideserve.cli.commands.main import app
from tideserve.cli.vllm_install import VLLM_VERSION

# "--flag" is an option of `tideserve serve` or `up`; "section: key" is a key of the --config file.
MAPPED = (
    ("--model", "MODEL", "`tideserve serve MODEL`, as `vllm serve MODEL`"),
    ("--served-model-name", "--served-model-name, gateway: model_aliases", "more names as aliases"),
    ("--host", "--host", "default 127.0.0.1; vLLM's opens the port to the network"),
    ("--port", "--port", ""),
    ("--grpc-port", "--grpc-port", "always on, with a contract of its own"),
    ("--api-key", "--api-key", "or `TIDESERVE_API_KEY`; `--api-keys` for several with limits"),
    ("--config", "--config", "YAML; its keys are those of tideserve"),
    ("--dtype", "--dtype", "bfloat16 by default; no float16 and no `auto`"),
    ("--load-format", "--load-format", "safetensors or dummy"),
    ("--max-model-len", "--max-model-len", ""),
    ("--max-num-seqs", "--max-num-seqs", "of each worker"),
    ("--max-num-batched-tokens", "--max-num-batched-tokens", "of each worker"),
    ("--gpu-memory-utilization", "--gpu-memory-utilization", "with `--device cpu`: of the host"),
    ("--kv-cache-memory-bytes", "--memory", "parameters and KV cache together, which trade places"),
    ("--block-size", "--block-size", "16 by default"),
    ("--data-parallel-size", "--workers", "each worker holds the model until groups merge"),
    ("--device-ids", "--device", "`cuda:N`, or `CUDA_VISIBLE_DEVICES`"),
    (
        "--scheduling-policy",
        "--scheduling",
        "fcfs; priority: by class, then `priority`; slo: by deadline",
    ),
    ("--max-num-queued-reqs", "--queue-limit", "waiting requests only; more get 503"),
    ("--enable-prefix-caching", "worker: prefix_caching", "on by default, as in vLLM"),
    ("--generation-config", "gateway: generation_config", "auto or none"),
    ("--tool-call-parser", "gateway: tool_format", "taken from the chat template by default"),
    ("--reasoning-parser", "gateway: reasoning_format", "taken from the chat template by default"),
    ("--ssl-certfile", "gateway: http_tls_cert_file", ""),
    ("--ssl-keyfile", "gateway: http_tls_key_file", ""),
    ("--ssl-ca-certs", "gateway: public_grpc_ca_file", "clients of gRPC only"),
    ("--allowed-origins", "gateway: cors_origins", "none by default; vLLM allows all"),
    ("--otlp-traces-endpoint", "services: otlp_endpoint", ""),
    ("--log-level", "services: log_level", ""),
    ("--uvicorn-log-level", "services: log_level", ""),
    ("--shutdown-timeout", "gateway: drain_timeout_s, worker: drain_timeout_s", ""),
)
NOT_NEEDED = (
    ("--enable-chunked-prefill", "prompts are always divided into chunks"),
    ("--enable-auto-tool-choice", "tools work where the chat template has a known form of calls"),
    ("--structured-outputs-config", "grammars and schemas are always compiled by llguidance"),
    ("--enable-prompt-tokens-details", "`usage` always has them"),
    ("--enable-request-id-headers", "every response has `X-Request-Id`"),
    ("--enable-log-requests", "each request has one line in the gateway's log"),
    ("--disable-log-stats", "statistics are at `/metrics` and in `tideserve status`"),
    ("--max-logprobs", "0 to 20 for each token, always"),
    ("--enable-ssl-refresh", "changed certificates are read without a restart"),
    ("--disable-fastapi-docs", "only `/openapi.json` is served"),
    ("--download-dir", "`HF_HOME` moves the hub's cache, which is read in place"),
    ("--hf-token", "set `HF_TOKEN`"),
    ("--seed", "`seed` is a field of requests"),
    ("--distributed-executor-backend", "workers find each other through etcd"),
    ("--nnodes", "workers find each other through etcd"),
    ("--master-addr", "workers find each other through etcd"),
    ("--pipeline-parallel-size", "groups form pipelines by themselves when KV cache overflows"),
    ("--attention-backend", "each device has one"),
    ("--enforce-eager", "CUDA graphs are captured when a batch size is first met"),
    ("--compilation-config", "kernels are compiled at the first start and kept"),
    ("--cudagraph-capture-sizes", "sizes are chosen by the engine"),
)
NOT_SUPPORTED = (
    ("--tensor-parallel-size", "a worker is one device"),
    ("--enable-expert-parallel", "no mixtures of experts"),
    ("--quantization", "weights are not quantized"),
    ("--kv-cache-dtype", "KV has the dtype of the model"),
    ("--enable-lora", "no adapters"),
    ("--lora-modules", "no adapters"),
    ("--max-loras", "no adapters"),
    ("--speculative-config", "no draft models"),
    ("--limit-mm-per-prompt", "text only"),
    ("--mm-processor-kwargs", "text only"),
    ("--runner", "text generation only: no embeddings, no scores"),
    ("--convert", "text generation only: no embeddings, no scores"),
    ("--trust-remote-code", "code from a model folder never runs"),
    ("--revision", "the hub's main branch is served; pass a folder for another revision"),
    ("--tokenizer", "the model folder's tokenizer.json is used"),
    ("--chat-template", "the model folder's template is used"),
    ("--default-chat-template-kwargs", "`chat_template_kwargs` is a field of requests"),
    ("--override-generation-config", "edit generation_config.json in a model folder"),
    ("--hf-overrides", "edit config.json in a model folder"),
    ("--cpu-offload-gb", "parameters stay on the device, here or at another worker"),
    ("--kv-offloading-size", "evicted KV is computed again"),
    ("--kv-transfer-config", "KV moves between workers of a group only"),
    ("--num-gpu-blocks-override", "`--memory` decides how many blocks there are"),
    ("--enable-sleep-mode", ""),
    ("--async-scheduling", "an iteration is planned when the last one has ended"),
    ("--uds", "TCP only"),
    ("--root-path", "put a proxy that rewrites paths in front"),
    ("--middleware", ""),
    ("--api-server-count", "one gateway per `serve`; more in containers and on Kubernetes"),
)
INTRODUCTION = f"""\
# From flags of `vllm serve` to settings of tideserve

Flags of vLLM {VLLM_VERSION} and what stands for them. A setting with two dashes is an option of
`tideserve serve` or, where it says so, of `tideserve up`; `section: key` is a key of the file that
`--config` names (see [configuration](configuration.md)). Fields of requests: [fields](fields.md).
"""


def setting_text(settings: str) -> str:
    """Settings as the page shows them.

    Raises:
        LookupError: if there is no such setting.
    """
    return ", ".join(_checked(name.strip()) for name in settings.split(","))


def _checked(name: str) -> str:
    section, colon, key = name.partition(": ")
    if colon:
        configs = CONFIGS.values() if section == "services" else [CONFIGS[section]]
        if not all(key in settings_of(config) for config in configs):
            raise LookupError(f"section {section} has no key {key}")
        return f"`{name}`"
    if name in options("serve"):
        return f"`{name}`"
    if name in options("up"):
        return f"`tideserve up {name}`"
    raise LookupError(f"neither `tideserve serve` nor `tideserve up` has {name}")


def options(command: str) -> set[str]:
    """The flags of a command of `tideserve`, and the names of its arguments in capitals."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    one = group.commands[command]
    parameters = one.get_params(typer.Context(one))
    return {opt if opt.startswith("-") else opt.upper() for each in parameters for opt in each.opts}


def rows() -> Iterator[tuple[str, str, str]]:
    """(flag of vLLM, setting of tideserve, note) of every flag on the page, in its order."""
    for flag, settings, note in MAPPED:
        yield f"`{flag}`", setting_text(settings), note
    for flag, note in NOT_NEEDED:
        yield f"`{flag}`", "not needed", note
    for flag, note in NOT_SUPPORTED:
        yield f"`{flag}`", "not supported", note
