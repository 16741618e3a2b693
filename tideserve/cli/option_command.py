"""Creates command-line flags from the fields of `ClusterOptions` when a command is used.

Creating the flags at import would load the configuration of all services for `tideserve --help`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

if TYPE_CHECKING:
    from services.common.setting import Setting

NO_DEFAULT = ("none", "empty")
FLAGS_OF_VLLM = "docs/vllm-flags.md lists the equivalent of each flag of vLLM."


@dataclass(frozen=True, slots=True)
class Wording:
    """Help, default and name of a flag that a command shows instead of the field's."""

    help: str | None = None
    default: str | None = None
    flag: str | None = None


@dataclass(frozen=True, slots=True)
class Flags:
    """Fields that become flags of a command: those in `names`, or all fields with a panel.

    `wordings` is keyed by field. With `panels`, the help groups flags under their headings.
    """

    names: Sequence[str] = ()
    wordings: Mapping[str, Wording] = field(default_factory=dict)
    panels: bool = False


Narrowed = Callable[[TyperCommand, Sequence[str]], TyperCommand | None]
"""Returns a command whose help is specific to the arguments, or None for the general help."""


def option_command(flags: Flags, narrowed: Narrowed | None = None) -> type[TyperCommand]:
    """A class of commands that have `flags` before their own.

    `context.obj` maps each field to its value, None if the flag is absent. With `narrowed`, the
    help may depend on the arguments.
    """

    class OptionCommand(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if narrowed is not None and not set(ctx.help_option_names).isdisjoint(args):
                _complete(self, flags)
                if (command := narrowed(self, args)) is not None:
                    typer.echo(command.get_help(ctx))
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
            given = {name: ctx.params.pop(name) for name in _complete(self, flags)}
            # typer's value of an absent repeatable flag is empty.
            ctx.obj = {name: None if value == () else value for name, value in given.items()}
            return super().invoke(ctx)

    return OptionCommand


def _complete(command: TyperCommand, flags: Flags) -> list[str]:
    """Add the flags to a command unless it has them; returns their names."""
    from services.common.setting import settings_of
    from tideserve.cli.cluster_options import ClusterOptions

    options = settings_of(ClusterOptions).values()
    chosen = [option for option in options if _is_chosen(option, flags)]
    names = [option.key for option in chosen]
    if not {parameter.name for parameter in command.params} >= set(names):
        command.params = [*_parameters(chosen, flags), *command.params]
    return names


def _is_chosen(option: "Setting", flags: Flags) -> bool:
    return option.key in flags.names if flags.names else "panel" in option.metadata


def _parameters(options: Sequence["Setting"], flags: Flags) -> list[Any]:
    """The parameters that typer derives from a function with these options."""

    def function(**_: Any) -> None:
        """Never called; typer reads its signature."""

    function.__annotations__ = {option.key: _annotation(option, flags) for option in options}
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for key, kind in function.__annotations__.items()
        ]
    )
    app = typer.Typer(add_completion=False)
    app.command()(function)
    parameters = typer.main.get_command(app).params
    return [parameter for parameter in parameters if parameter.name != "help"]


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
    # Sizes (with units) and enum names stay text here; the configuration reader parses them.
    kinds = () if option.metadata.get("size") else option.kinds
    kind: Any = next((kind for kind in (int, float, Path) if kind in kinds), str)
    if any(get_origin(kind) is tuple for kind in option.kinds):
        kind = list[str]
    return Annotated[kind | None, info]
