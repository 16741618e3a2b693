"""Declares settings as dataclass fields with a default, a range and a help text.

`services.common.config` reads such a dataclass from files and the environment. Each function
returns a `dataclasses.field` whose metadata describes the setting.
"""

import re
from collections.abc import Iterable
from dataclasses import MISSING, field
from typing import Any

from services.core.ids import NAME_LENGTH_MAX

_MODEL_NAME = (
    re.compile(f".{{1,{NAME_LENGTH_MAX}}}", re.DOTALL),
    f"1 to {NAME_LENGTH_MAX} characters",
)
_DEVICE = (re.compile(r"cpu|cuda(:\d{1,3})?"), "cpu, cuda or cuda:N")


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A setting without range checks; `help` is a sentence for `--help` and the reference.

    `more` is metadata. `secret`: never printed, and may also be read from a file, whose path the
    key `<name>_file` holds. `expert`: omitted from the reference. `key`: name in a configuration,
    if it differs from the field's. `default_text`: documents the default instead of its value;
    `elsewhere`: documents the default in other environments, such as on GPUs. `panel`: heading of
    the flag in the help.
    """
    metadata = {"help": help, **more}
    return field(default=default, metadata=metadata, repr=not more.get("secret"))


def number(
    default: Any = MISSING,
    help: str = "",
    *,
    minimum: float,
    maximum: float,
    multiple_of: int = 1,
    **more: Any,
) -> Any:
    """A number in [minimum, maximum]."""
    return option(default, help, range=(minimum, maximum), multiple_of=multiple_of, **more)


def seconds(default: Any, help: str = "", *, minimum: float = 0, **more: Any) -> Any:
    """A duration in seconds."""
    return number(default, help, minimum=minimum, maximum=10**6, **more)


def size(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A `number` of bytes; accepts units such as 1GiB."""
    return number(default, help, size=True, **more)


def tcp_port(default: Any, help: str) -> Any:
    """A TCP port; 0 selects any free port."""
    return number(default, help, minimum=0, maximum=65535)


def choice(default: Any, options: Iterable[str], help: str = "", **more: Any) -> Any:
    """A choice of `options`: strings, or members of the enum that is the field's type."""
    return option(default, help, options=tuple(options), **more)


def device_name(default: Any, help: str = "") -> Any:
    """Name of a device; does not check whether this machine has it."""
    return option(default, help, pattern=_DEVICE)


def served_name(help: str, default: Any = MISSING) -> Any:
    """Name of a model, as long as the scheduler accepts it."""
    return option(default, help, pattern=_MODEL_NAME)


def mapping(help: str = "") -> Any:
    """A setting whose value is a mapping, empty by default."""
    return field(default_factory=dict, metadata={"help": help, "default_text": "none"})


def mappings(help: str = "") -> Any:
    """A setting whose value is a list of mappings, empty by default."""
    return option((), help, default_text="none")


def nested(defaults: Any) -> Any:
    """A nested dataclass of settings, whose keys are flattened into those of the outer dataclass.

    If several nested dataclasses have a field of the same name, one key sets them all. `defaults`
    is an instance of the dataclass.
    """
    return field(default=defaults, metadata={"nested": True})


def computed(default: Any) -> Any:
    """A field that the program computes; not a configuration key."""
    return field(default=default, metadata={"computed": True})
