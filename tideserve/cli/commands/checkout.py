"""Commands that need the source tree: the folder `benchmarks` is not in the wheel."""

import sys
from pathlib import Path

import typer

from tideserve.cli.errors import EXIT_UNUSABLE, CommandError
from tideserve.cli.option_command import option_command

CHECKOUT = Path(__file__).resolve().parents[3]


def in_checkout() -> bool:
    """Whether this package is in a source tree; beside a wheel, `benchmarks` is unrelated."""
    files = (CHECKOUT / "pyproject.toml", CHECKOUT / "benchmarks" / "command.py")
    return all(file.is_file() for file in files)


def add_bench(app: typer.Typer) -> None:
    """Add `tideserve bench` to the commands of `app`."""
    if not in_checkout():
        settings = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command("bench", context_settings=settings)(_unavailable)
        return
    # Import from this tree, because another package `benchmarks` may come first on the path.
    sys.path.insert(0, str(CHECKOUT))
    from benchmarks import command

    sys.path.remove(str(CHECKOUT))
    epilog, changed = command.EPILOG, command.of_scenario
    app.command(cls=option_command(command.FLAGS, changed), epilog=epilog)(command.bench)


def run_against(
    result: Path, profile: str | None, calibrate: Path | None, json: Path | None
) -> None:
    """Simulate the benchmark whose figures are in `result`. Raises CommandError."""
    if not in_checkout():
        _unavailable()
    from benchmarks.against import run_against as run

    run(result, profile, calibrate, json)


def _unavailable() -> None:
    """Benchmarks run from a source tree."""
    raise CommandError(
        "the installed package has no benchmarks; run this command from a source checkout",
        EXIT_UNUSABLE,
    )
