"""The page docs/vllm-flags.md: settings of tideserve for the flags of `vllm serve`."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.core import TyperGroup

from services.common.setting import settings_of
from tideserve.cli.cluster_options import CONFIGS
from tideserve.cli.commands.main import app
from tideserve.cli.vllm_install import VLLM_VERSION

TABLE = Path(__file__).with_suffix(".csv")
"""Options start with two dashes; "section: key" is a key of the --config file."""
WITHOUT_SETTING = ("not needed", "not supported")
INTRODUCTION = f"""\
# From flags of `vllm serve` to settings of tideserve

Flags of vLLM {VLLM_VERSION} and the corresponding settings. A setting with two dashes is an option
of `tideserve serve` or, where stated, of `tideserve up`; `section: key` is a key of the `--config`
file (see [configuration](configuration.md)). Fields of requests: [fields](fields.md).
"""


def setting_text(settings: str) -> str:
    """Settings as shown on the page.

    Raises:
        LookupError: if a setting does not exist.
    """
    return ", ".join(_checked(name.strip()) for name in settings.split(","))


def _checked(name: str) -> str:
    section, colon, key = name.partition(": ")
    if colon:
        configs = CONFIGS.values() if section == "services" else [CONFIGS[section]]
        if not all(key in settings_of(config) for config in configs):
            raise LookupError(f"section {section} has no key {key}")
        return f"`{name}`"
    if name in options("serve"):
        return f"`{name}`"
    if name in options("up"):
        return f"`tideserve up {name}`"
    raise LookupError(f"neither `tideserve serve` nor `tideserve up` has {name}")


def checked_note(note: str) -> str:
    """The note, after checking that its options of `tideserve serve` or the named command exist.

    Raises:
        LookupError: if an option does not exist.
    """
    for command, option in re.findall(r"`(?:tideserve (\w+) )?(--[\w-]+)", note):
        if option not in options(command or "serve"):
            raise LookupError(f"`tideserve {command or 'serve'}` has no {option}")
    return note


def options(command: str) -> set[str]:
    """The flags of a `tideserve` command, and the names of its arguments in capitals."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    typer_command = group.commands[command]
    parameters = typer_command.get_params(typer.Context(typer_command))
    return {opt if opt.startswith("-") else opt.upper() for each in parameters for opt in each.opts}


def rows() -> Iterator[tuple[str, str, str]]:
    """(flag of vLLM, setting of tideserve, note) per flag, in page order."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        for flag, setting, note in list(csv.reader(file))[1:]:
            yield (
                f"`{flag}`",
                setting if setting in WITHOUT_SETTING else setting_text(setting),
                checked_note(note),
            )
