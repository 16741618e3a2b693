"""`tideserve engine`: engines beside our own. Everything heavy is imported when it runs."""

from enum import StrEnum
from typing import Annotated

import typer

engine = typer.Typer(
    help="Install another engine for `tideserve up --engine NAME`.", no_args_is_help=True
)


class Installable(StrEnum):
    """Engines that can be installed."""

    VLLM = "vllm"


@engine.callback()
def engines() -> None:
    """Keep `install` a command of its own; a group with one command would be that command."""


@engine.command(epilog="Example:\n\n  tideserve engine install vllm")
def install(name: Annotated[Installable, typer.Argument(help="Which engine.")]) -> None:
    """Install an engine into an environment of its own in the cache folder; print its Python.

    vLLM: about 3.5 GB in its CPU build, or about 9 GB in its usual build where there is an NVIDIA
    device. Nothing happens if the right version is there. Benchmarks use the same environment.
    """
    from tideserve.cli.vllm_install import install_vllm

    assert name is Installable.VLLM
    print(install_vllm())
