"""`tideserve profile`. Everything heavy is imported when it runs."""

from typing import Annotated

import typer

from tideserve.cli.option_command import Flags, Wording

FLAGS = Flags(
    ("model", "dtype", "load_format", "device", "memory", "threads", "workers"),
    {
        "threads": Wording(default="as for a worker of tideserve up"),
        "workers": Wording(
            "Workers that share this machine's processors and memory: as many engines run at"
            " once, and one is measured. Other devices are measured alone."
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
        bool, typer.Option("--quick", help="About 40 seconds instead of two minutes.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Measure how long iterations take here, fit the cost model and store it for workers.

    Reports the error on batches that the fit has not seen, beside the noise of the machine.
    """
    from tideserve.cli.profile import run_profile

    run_profile(context.obj, quick, json)
