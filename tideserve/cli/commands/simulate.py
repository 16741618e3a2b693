"""`tideserve simulate`. Slow imports happen when the command runs."""

from pathlib import Path
from typing import Annotated

import typer

from tideserve.cli.errors import EXIT_UNUSABLE, CommandError

EXAMPLES = (
    "Examples:\n\n"
    "  tideserve simulate tideserve/sim/examples/burst-a100.yaml\n\n"
    "  tideserve simulate my-cluster.yaml --seed 7 --json figures.json\n\n"
    "  tideserve simulate --against bench.json\n\n"
    "  tideserve simulate --against burst.json --calibrate burst.json"
)


def simulate(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file; examples are in tideserve/sim/examples.", show_default=False
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of arrivals and lengths.", show_default="the file's, or 0"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Result of 'tideserve bench --json' to simulate (checkout only)."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="With --against: name or file of the device profile.",
            show_default="the profile that 'tideserve profile' stored",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="With --against: a result whose measured iteration times scale the profile. If it"
            " is the same file, each system is scaled by the other systems."
        ),
    ] = None,
) -> None:
    """Simulate a cluster of any size with the policies of a real cluster.

    With --against, simulates the load of a benchmark and compares the measured figures.
    """
    if (config is None) == (against is None):
        raise CommandError("pass a configuration file, or a result with --against", EXIT_UNUSABLE)
    if against is None and (profile is not None or calibrate is not None):
        raise CommandError("--profile and --calibrate need --against", EXIT_UNUSABLE)
    if against is not None and seed is not None:
        raise CommandError("--against uses the seed of the result; remove --seed", EXIT_UNUSABLE)
    if against is not None:
        from tideserve.cli.commands.checkout import run_against

        run_against(against, profile, calibrate, json)
    elif config is not None:
        from tideserve.cli.simulate import run_simulation

        run_simulation(config, seed, json)
