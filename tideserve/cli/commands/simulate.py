"""`tideserve simulate`. Everything heavy is imported when it runs."""

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
    json: Annotated[Path | None, typer.Option(help="File for all figures.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Result of 'tideserve bench --json', in a checkout: simulate its load."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="With --against: name or file of the device profile.",
            show_default="the one that 'tideserve profile' stored",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="With --against: another result of 'tideserve bench', whose workers counted how"
            " much longer iterations took than the profile predicts. If it is the same result,"
            " each system is scaled by the others."
        ),
    ] = None,
) -> None:
    """Simulate a cluster of any size with the policies of the real one.

    With --against, simulates a benchmark, and shows what was measured beside what it gives.
    """
    if (config is None) == (against is None):
        raise CommandError("give a configuration, or a result with --against", EXIT_UNUSABLE)
    if against is None and (profile is not None or calibrate is not None):
        raise CommandError("--profile and --calibrate go with --against only", EXIT_UNUSABLE)
    if against is not None and seed is not None:
        raise CommandError("--seed is the result's own with --against", EXIT_UNUSABLE)
    if against is not None:
        from tideserve.cli.commands.checkout import run_against

        run_against(against, profile, calibrate, json)
    elif config is not None:
        from tideserve.cli.simulate import run_simulation

        run_simulation(config, seed, json)
