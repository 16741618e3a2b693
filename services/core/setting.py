"""Declarations of settings: dataclass fields that carry a default, a range and a sentence.

`services.common.config` reads such a dataclass from files and the environment. Core declares its
own settings with them, so that a service and the simulator need not repeat a default.
"""

import re
from collections.abc import Iterable
from dataclasses import MISSING, field
from typing import Any

_DEVICE = (re.compile(r"cpu|cuda(:\d{1,3})?"), "cpu, cuda or cuda:N")


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A setting without further checks; `help` is one sentence for `--help` and the reference.

    `more` is metadata. `secret`: never shown, and may also be given as a file (key `<name>_file`).
    `expert`: left out of the reference. `key`: the name in a configuration, if it is not that of
    the field. `default_text`: the default in words; `elsewhere`: what it
    is in other places. `panel`: a flag's heading in the help.
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
    """A duration."""
    return number(default, help, minimum=minimum, maximum=10**6, **more)


def size(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A `number` of bytes, which may also be written with a unit, such as 1GiB."""
    return number(default, help, size=True, **more)


def tcp_port(default: Any, help: str) -> Any:
    """A TCP port; 0: any free one."""
    return number(default, help, minimum=0, maximum=65535)


def choice(default: Any, options: Iterable[str], help: str = "", **more: Any) -> Any:
    """One of `options`: text, or members of an enum if the field's type is that enum."""
    return option(default, help, options=tuple(options), **more)


def device_name(default: Any, help: str = "") -> Any:
    """The name of a device, whether or not this machine has it."""
    return option(default, help, pattern=_DEVICE)


def mapping(help: str = "") -> Any:
    """A mapping, empty by default."""
    return field(default_factory=dict, metadata={"help": help, "default_text": "none"})


def nested(defaults: Any) -> Any:
    """A dataclass of settings; its keys stand beside those of the outer one.

    A key that several nested dataclasses have is one key. `defaults` is an instance.
    """
    return field(default=defaults, metadata={"nested": True})


def computed(default: Any) -> Any:
    """A field that the program fills in; not a key."""
    return field(default=default, metadata={"computed": True})
