"""`tideserve profile`. Slow imports happen when the command runs."""

from typing import Annotated

import typer

from tideserve.cli.option_command import Flags, Wording

FLAGS = Flags(
    ("model", "dtype", "load_format", "device", "memory", "threads", "workers"),
    {
        "threads": Wording(default="as for workers of tideserve up"),
        "workers": Wording(
            "Workers that share this machine's CPUs and memory: as many engines run concurrently,"
            " and a single engine is measured. GPUs are measured alone."
        ),
    },
)
EXAMPLES = (
    "Examples:\n\n"
    "  tideserve profile\n\n"
    "  tideserve profile --quick --json | jq .error\n\n"
    "  tideserve profile --model ./my-model --dtype float32 --threads 2\n\n"
    "  tideserve profile --device cuda --memory 60GiB --load-format dummy --model ./my-model"
)


def profile(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Take about 40 seconds instead of two minutes.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Measure iteration times on this machine, fit the cost model and store it for workers.

    Reports the error on held-out batches and the noise of the machine.
    """
    from tideserve.cli.profile import run_profile

    run_profile(context.obj, quick, json)
