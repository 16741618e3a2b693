"""`tideserve serve`: `tideserve up` with the flag names of `vllm serve`.

Slow imports happen when the command runs.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tideserve.cli.commands.up import ConfigFile, WithParent, run
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError
from tideserve.cli.option_command import Flags, Wording
from tideserve.cli.option_types import ApiKey, ClusterDir

if TYPE_CHECKING:
    from tideserve.cli.cluster_options import ClusterOptions

GPU_MEMORY_PART = 0.9
FLAGS = Flags(
    (
        *("model_name", "dtype", "load_format", "engine", "workers", "memory", "device"),
        *("max_running", "max_batch_tokens", "max_model_len", "overload_policy", "scheduling"),
        *("host", "port"),
    ),
    {
        "model_name": Wording(flag="--served-model-name"),
        "workers": Wording(default="2; with --device cuda, one for each GPU"),
        "memory": Wording(default=f"1GiB; with --device cuda, {GPU_MEMORY_PART} of the GPU"),
        "max_running": Wording(flag="--max-num-seqs"),
        "max_batch_tokens": Wording(flag="--max-num-batched-tokens"),
    },
    panels=True,
)
EXAMPLES = (
    "Examples:\n\n"
    "  tideserve serve\n\n"
    "  tideserve serve Qwen/Qwen2.5-0.5B-Instruct --port 9000 --gpu-memory-utilization 0.5\n\n"
    "  tideserve serve ./my-model --served-model-name mine --max-model-len 4096"
)


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Hub id or local folder with safetensors.", show_default="SmolLM2-135M-Instruct"
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Instead of --memory: the fraction of each GPU's memory for its workers; with"
            " --device cpu, the fraction of this machine's memory for all workers together.",
            min=0.01,
            max=1.0,
        ),
    ] = None,
    api_key: ApiKey = None,
    config: ConfigFile = None,
    cluster_dir: ClusterDir = None,
    with_parent: WithParent = False,
) -> None:
    """Serve a model on this machine: `tideserve up` with the flag names of `vllm serve`.

    Runs until Ctrl-C. Other options of `tideserve up` go into the file of --config.
    docs/vllm-flags.md lists the settings for vLLM's other flags.
    """
    if gpu_memory_utilization is not None and context.obj["memory"] is not None:
        raise CommandError(
            "--memory and --gpu-memory-utilization both set the memory of a worker; set only one",
            EXIT_UNUSABLE,
        )
    flags = context.obj | {"model": model, "api_key": api_key, "cluster_dir": cluster_dir}
    run(lambda: serve_options(config, flags, gpu_memory_utilization), with_parent)


def serve_options(
    config: Path | None, flags: dict[str, Any], part: float | None
) -> "ClusterOptions":
    """Options of the cluster: a worker per GPU; `part` is the fraction of memory for workers.

    Raises:
        ConfigError: if an option is invalid.
    """
    from services.common.host_memory import limit_bytes
    from tideserve.cli.cluster_options import read_options
    from tideserve.cli.host import gpu_memory_bytes

    options = read_options(config, flags)
    device = str(options.worker.get("device", options.device))
    index = device.partition(":")[2]
    if device == "cpu":
        defaults, share = {}, limit_bytes() // options.workers
    else:
        gpus = gpu_memory_bytes()[int(index) :][:1] if index else gpu_memory_bytes()
        if not gpus:
            raise CommandError(
                f"the NVIDIA driver has no device {device}; see `nvidia-smi`, or remove --device",
                EXIT_UNUSABLE,
            )
        defaults = {"workers": len(gpus)}
        sharing = read_options(config, flags, defaults).workers if index else 1
        share = min(gpus) // sharing
        defaults["memory"] = _whole_mib(GPU_MEMORY_PART * share)
    if part is not None:
        flags = flags | {"memory": _whole_mib(part * share)}
    return read_options(config, flags, defaults)


def _whole_mib(size_bytes: float) -> int:
    return int(size_bytes) >> 20 << 20
