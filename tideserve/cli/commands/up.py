"""`tideserve up`. Slow imports happen when the command runs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tideserve.cli.errors import unusable
from tideserve.cli.option_command import Flags
from tideserve.cli.option_types import ApiKey, ClusterDir

if TYPE_CHECKING:
    from tideserve.cli.cluster_options import ClusterOptions

FLAGS = Flags(panels=True)
EXAMPLES = (
    "Examples:\n\n"
    "  tideserve up\n\n"
    "  tideserve up --model Qwen/Qwen2.5-0.5B-Instruct --workers 1 --memory 4GiB\n\n"
    "  tideserve up --model ./my-model --dtype float32 --port 9000\n\n"
    "  TIDESERVE_API_KEY=secret tideserve up --host 0.0.0.0\n\n"
    "  tideserve up --config cluster.yaml"
)


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file with these options (queue_limit: 64). Its sections gateway, scheduler,"
        " memmgr and worker hold further options of these services, and section services options"
        " of all services. Flags take precedence.",
    ),
]
WithParent = Annotated[
    bool,
    typer.Option("--with-parent", help="Stop when the parent process (make) ends."),
]


def up(
    context: typer.Context,
    api_key: ApiKey = None,
    config: ConfigFile = None,
    cluster_dir: ClusterDir = None,
    with_parent: WithParent = False,
) -> None:
    """Start a cluster: gateway, scheduler, memory manager, workers.

    Runs until Ctrl-C, then drains and stops all processes. Restarts processes that die.
    """
    flags = context.obj | {"api_key": api_key, "cluster_dir": cluster_dir}

    def options() -> "ClusterOptions":
        from tideserve.cli.cluster_options import read_options

        return read_options(config, flags)

    run(options, with_parent)


def run(options: Callable[[], "ClusterOptions"], with_parent: bool) -> None:
    """Run a cluster with `options`, which may raise ConfigError, until a signal stops it."""
    from tideserve.cli.parent_watch import ParentWatch
    from tideserve.cli.stop_signals import StopSignals

    signals = StopSignals()
    signals.install()
    if with_parent:
        ParentWatch().start(signals.request)
    from services.common.errors import ConfigError
    from tideserve.cli.up import Up

    with unusable(ConfigError):
        chosen = options()
    Up(chosen, signals).run()
