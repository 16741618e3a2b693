"""`tideserve simulate`. Slow imports happen when the command runs."""

from pathlib import Path
from typing import Annotated

import typer

from tideserve.cli.errors import EXIT_UNUSABLE, CommandError
from tideserve.cli.papers import Paper

EXAMPLES = (
    "Examples:\n\n"
    "  tideserve simulate tideserve/sim/examples/burst-a100.yaml\n\n"
    "  tideserve simulate my-cluster.yaml --seed 7 --json figures.json\n\n"
    "  tideserve simulate --against bench.json\n\n"
    "  tideserve simulate --against burst.json --calibrate burst.json\n\n"
    "  tideserve simulate --paper bucketserve --page bucketserve.html"
)


Config = Annotated[
    Path | None,
    typer.Argument(help="YAML file; examples are in tideserve/sim/examples.", show_default=False),
]
Seed = Annotated[
    int | None,
    typer.Option(min=0, help="Seed of arrivals and lengths.", show_default="the file's, or 0"),
]
Json = Annotated[Path | None, typer.Option(help="Write all figures to this file.")]
Against = Annotated[
    Path | None,
    typer.Option(help="Result of 'tideserve bench --json' to simulate (checkout only)."),
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="With --against: name or file of the device profile.",
        show_default="the profile that 'tideserve profile' stored",
    ),
]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        help="With --against: a result whose measured iteration times scale the profile. If it"
        " is the same file, each system is scaled by the other systems."
    ),
]
PaperName = Annotated[
    Paper | None,
    typer.Option(
        help="Simulate the figures of a paper, and write a page with its numbers beside ours."
    ),
]
Page = Annotated[
    Path | None,
    typer.Option(help="With --paper: the HTML file.", show_default="named like the paper, here"),
]


def simulate(
    config: Config = None,
    seed: Seed = None,
    json: Json = None,
    against: Against = None,
    profile: Profile = None,
    calibrate: Calibrate = None,
    paper: PaperName = None,
    page: Page = None,
) -> None:
    """Simulate a cluster of any size with the policies of a real cluster.

    With --against, simulates the load of a benchmark and compares the measured figures.
    """
    if paper is not None:
        if any(value is not None for value in (config, json, against, profile, calibrate)):
            raise CommandError(
                "--paper takes only --page and --seed; remove the rest", EXIT_UNUSABLE
            )
        from tideserve.cli.papers.command import run_paper

        run_paper(paper, seed, page)
        return
    if page is not None:
        raise CommandError("--page needs --paper; add it, or remove --page", EXIT_UNUSABLE)
    if (config is None) == (against is None):
        raise CommandError(
            "pass a configuration file, a result with --against, or a --paper", EXIT_UNUSABLE
        )
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
