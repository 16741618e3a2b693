"""`tideserve engine`: installs other engines. Slow imports happen when the command runs."""

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
    """Keep `install` a subcommand: typer would merge a group that has a single command."""


@engine.command(epilog="Example:\n\n  tideserve engine install vllm")
def install(name: Annotated[Installable, typer.Argument(help="Name of the engine.")]) -> None:
    """Install an engine into a separate environment in the cache folder; print its Python.

    vLLM takes about 3.5 GB as CPU build, or about 9 GB as CUDA build on machines with an NVIDIA
    device. No effect if the version is installed. Benchmarks use the same environment.
    """
    from tideserve.cli.vllm_install import install_vllm

    assert name is Installable.VLLM
    print(install_vllm())
