"""The options of `tideserve up`. Everything heavy is imported when it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tideserve.cli.default import DEFAULT_PORT
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError
from tideserve.cli.option_types import ApiKey, ClusterDir

MODEL, RESOURCES, LIMITS, CLUSTER = "Model", "Resources", "Limits", "Cluster"
EXAMPLES = (
    "Examples:\n\n"
    "  tideserve up\n\n"
    "  tideserve up --model Qwen/Qwen2.5-0.5B-Instruct --workers 1 --memory 4GiB\n\n"
    "  tideserve up --model ./my-model --dtype float32 --port 9000\n\n"
    "  TIDESERVE_API_KEY=secret tideserve up --host 0.0.0.0\n\n"
    "  tideserve up --config cluster.yaml"
)


def up(
    model: Annotated[
        str | None,
        typer.Option(
            help="Hub id or local folder with safetensors.",
            show_default="SmolLM2-135M-Instruct",
            rich_help_panel=MODEL,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            help="Name that clients send.",
            show_default="the hub id or the folder's name",
            rich_help_panel=MODEL,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float32 or float64.", show_default="bfloat16", rich_help_panel=MODEL
        ),
    ] = None,
    load_format: Annotated[
        str | None,
        typer.Option(
            help="auto, or dummy for random weights.", show_default="auto", rich_help_panel=MODEL
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="How many workers; each holds the model.",
            show_default="2",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Device memory of each worker: parameters, KV cache and staging.",
            show_default="1GiB",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device of the workers: cpu, cuda or cuda:N.",
            show_default="cpu",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Compute threads of each worker.",
            show_default="processors / workers",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    chunk_size: Annotated[
        str | None,
        typer.Option(
            help="Size of a chunk of device memory, such as 2MiB; whole pages.",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Tokens in a KV block.", rich_help_panel=RESOURCES),
    ] = None,
    overload_policy: Annotated[
        str | None,
        typer.Option(
            help="When requests overflow the KV cache: drop replicated layers, or recompute.",
            show_default="drop",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    paced: Annotated[
        str | None,
        typer.Option(
            help="Pad iterations to the times of a device profile, such as A100-14B, or a file;"
            " A100-14B:2 is half as fast.",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(help="Requests that a worker runs at once.", rich_help_panel=LIMITS),
    ] = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of one iteration; more raise throughput and the time between tokens.",
            show_default="256",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt and answer together, in tokens.",
            show_default="what the model and the KV cache allow",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    queue_limit: Annotated[
        int | None,
        typer.Option(help="Requests that may wait; more get 503.", rich_help_panel=LIMITS),
    ] = None,
    queue_deadline: Annotated[
        float | None,
        typer.Option(help="Seconds that one may wait; then 504.", rich_help_panel=LIMITS),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on; 0.0.0.0 opens it to the network.",
            show_default="127.0.0.1",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="HTTP port; all others are found through etcd.",
            show_default=str(DEFAULT_PORT),
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    api_key: ApiKey = None,
    etcd: Annotated[
        str | None,
        typer.Option(
            help="URL of a running etcd.",
            show_default="a private one",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    lease_ttl: Annotated[
        int | None,
        typer.Option(
            help="Seconds after which a silent service counts as gone.", rich_help_panel=CLUSTER
        ),
    ] = None,
    ready_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds until the cluster must be ready.",
            show_default="180",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with these options (queue_limit: 64) and sections gateway, scheduler,"
            " memmgr, worker for more of theirs. Flags win.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    cluster_dir: ClusterDir = None,
    with_parent: Annotated[
        bool,
        typer.Option(
            "--with-parent",
            help="Stop when the process that started this one ends (make).",
            rich_help_panel=CLUSTER,
        ),
    ] = False,
) -> None:
    """Start a cluster: gateway, scheduler, memory manager, workers.

    It runs until Ctrl-C, drains then, and leaves no process behind. What dies is started again.
    """
    flags = dict(locals())
    for name in ("config", "with_parent"):
        del flags[name]
    _up(config, flags, with_parent)


def _up(config: Path | None, flags: dict[str, Any], with_parent: bool) -> None:
    from tideserve.cli.parent_watch import ParentWatch
    from tideserve.cli.stop_signals import StopSignals

    signals = StopSignals()
    signals.install()
    if with_parent:
        ParentWatch().start(signals.request)
    from services.common.errors import ConfigError
    from tideserve.cli.cluster_options import read_options
    from tideserve.cli.up import Up

    try:
        options = read_options(config, flags)
    except ConfigError as error:
        raise CommandError(str(error), EXIT_UNUSABLE) from error
    Up(options, signals).run()
