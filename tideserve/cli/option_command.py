"""Flags that are made from the fields of `ClusterOptions`, when a command that has them is used.

Not before: the configurations of the services would be loaded for every `tideserve --help`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

if TYPE_CHECKING:
    from services.common.setting import Setting

NO_DEFAULT = ("none", "empty")
FLAGS_OF_VLLM = "docs/vllm-flags.md lists what stands for each flag of vLLM."


@dataclass(frozen=True, slots=True)
class Wording:
    """A command's own words for an option, in place of the field's; `flag` is its name there."""

    help: str | None = None
    default: str | None = None
    flag: str | None = None


@dataclass(frozen=True, slots=True)
class Flags:
    """Which fields become flags of a command: those of `names`, or all that have a panel.

    `wordings` are by the name of the field. With `panels` they are shown under their headings.
    """

    names: Sequence[str] = ()
    wordings: Mapping[str, Wording] = field(default_factory=dict)
    panels: bool = False


Narrowed = Callable[[TyperCommand, Sequence[str]], TyperCommand | None]
"""Makes of a command and its arguments one with the help for just these; None: its own will do."""


def option_command(flags: Flags, narrowed: Narrowed | None = None) -> type[TyperCommand]:
    """A class of commands that have these flags before their own.

    The command finds the values in `context.obj`, by the name of the field, None where not given.
    With `narrowed`, its help may depend on its arguments.
    """

    class OptionCommand(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if narrowed is not None and not set(ctx.help_option_names).isdisjoint(args):
                _complete(self, flags)
                if (one := narrowed(self, args)) is not None:
                    typer.echo(one.get_help(ctx))
                    ctx.exit()
            try:
                return super().parse_args(ctx, args)
            except TyperException as error:
                if flags.panels and error.message.startswith("No such option"):
                    error.message += f". {FLAGS_OF_VLLM}"
                raise

        def get_params(self, ctx: Any) -> list[Any]:
            _complete(self, flags)
            return super().get_params(ctx)

        def invoke(self, ctx: Any) -> Any:
            ctx.obj = {name: ctx.params.pop(name) for name in _complete(self, flags)}
            return super().invoke(ctx)

    return OptionCommand


def _complete(command: TyperCommand, flags: Flags) -> list[str]:
    """Give the command its flags, unless it has them; returns their names."""
    from services.common.setting import settings_of
    from tideserve.cli.cluster_options import ClusterOptions

    chosen = [one for one in settings_of(ClusterOptions).values() if _is_chosen(one, flags)]
    names = [one.key for one in chosen]
    if not {one.name for one in command.params} >= set(names):
        command.params = [*_parameters(chosen, flags), *command.params]
    return names


def _is_chosen(option: "Setting", flags: Flags) -> bool:
    return option.key in flags.names if flags.names else "panel" in option.metadata


def _parameters(options: Sequence["Setting"], flags: Flags) -> list[Any]:
    """What typer makes of a function that has these parameters."""

    def function(**_: Any) -> None:
        """Never called; typer reads its signature."""

    function.__annotations__ = {one.key: _annotation(one, flags) for one in options}
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for key, kind in function.__annotations__.items()
        ]
    )
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return [one for one in typer.main.get_command(app).params if one.name != "help"]


def _annotation(option: "Setting", flags: Flags) -> Any:
    wording = flags.wordings.get(option.key, Wording())
    text = wording.help or option.help
    if {"options", "pattern", "range"} & option.metadata.keys():
        text += f" [dim]\\[{option.values_text}][/]"
    default = wording.default or option.default_text
    info = typer.Option(
        *([wording.flag] if wording.flag else []),
        help=text,
        show_default=False if default in NO_DEFAULT else default,
        rich_help_panel=option.metadata.get("panel") if flags.panels else None,
        hidden="expert" in option.metadata,
    )
    # Sizes, which have units, and names of enums are read with the rest of the configuration.
    kinds = () if option.metadata.get("size") else option.kinds
    kind: Any = next((kind for kind in (int, float, Path) if kind in kinds), str)
    return Annotated[kind | None, info]
