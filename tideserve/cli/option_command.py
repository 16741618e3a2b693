"""Flags that are made from the fields of `ClusterOptions`, when a command that has them is used.

Not before: the configurations of the services would be loaded for every `tideserve --help`.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

NO_DEFAULT = ("none", "empty")


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
            return super().parse_args(ctx, args)

        def get_params(self, ctx: Any) -> list[Any]:
            _complete(self, flags)
            return super().get_params(ctx)

        def invoke(self, ctx: Any) -> Any:
            ctx.obj = {name: ctx.params.pop(name) for name in _complete(self, flags)}
            return super().invoke(ctx)

    return OptionCommand


def _complete(command: TyperCommand, flags: Flags) -> list[str]:
    """Give the command its flags, unless it has them; returns their names."""
    from tideserve.cli.cluster_options import ClusterOptions

    chosen = [one for one in dataclasses.fields(ClusterOptions) if _is_chosen(one, flags)]
    names = [one.name for one in chosen]
    if not {one.name for one in command.params} >= set(names):
        command.params = [*_parameters(ClusterOptions, chosen, flags), *command.params]
    return names


def _is_chosen(one: dataclasses.Field[Any], flags: Flags) -> bool:
    return one.name in flags.names if flags.names else one.metadata.get("panel") is not None


def _parameters(
    cls: type[Any], chosen: Sequence[dataclasses.Field[Any]], flags: Flags
) -> list[Any]:
    """What typer makes of a function that has these parameters."""
    hints = typing.get_type_hints(cls)
    app = typer.Typer(add_completion=False)
    app.command()(_function([(one, hints[one.name]) for one in chosen], flags))
    return [one for one in typer.main.get_command(app).params if one.name != "help"]


def _function(chosen: Sequence[tuple[dataclasses.Field[Any], Any]], flags: Flags) -> Any:
    def function(**_: Any) -> None:
        """Never called; typer reads its signature."""

    parameters = []
    for one, hint in chosen:
        wording = flags.wordings.get(one.name, Wording())
        info = typer.Option(
            *([wording.flag] if wording.flag else []),
            help=_help(one, hint, wording),
            show_default=_default(one, wording),
            rich_help_panel=one.metadata.get("panel") if flags.panels else None,
        )
        kind: Any = _flag_type(one, hint)
        annotation = Annotated[kind | None, info]
        function.__annotations__[one.name] = annotation
        parameters.append(
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )
    del function.__annotations__["_"]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def _flag_type(one: dataclasses.Field[Any], hint: Any) -> Any:
    """What typer may read: sizes, which have units, are read with the rest of the options."""
    from services.common.config import kinds_of

    if one.metadata.get("size"):
        return str
    return next(kind for kind in kinds_of(hint) if kind is not types.NoneType)


def _help(one: dataclasses.Field[Any], hint: Any, wording: Wording) -> str:
    from services.common.reference import values_text

    text = wording.help or str(one.metadata["help"])
    checked = {"options", "pattern", "range"} & one.metadata.keys()
    return f"{text} [dim]\\[{values_text(hint, one.metadata)}][/]" if checked else text


def _default(one: dataclasses.Field[Any], wording: Wording) -> str | bool:
    from services.common.reference import default_text

    text = wording.default or default_text(one)
    return False if text in NO_DEFAULT else text
