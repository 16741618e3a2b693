"""Maps between Python enums and protobuf enums, whose value names have a common prefix."""

from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeVar

E = TypeVar("E", bound=Enum)


def numbers(values: Iterable[E], wire: Any, prefix: str) -> dict[E, Any]:
    """The protobuf number of each value. Raises ValueError if `wire` lacks a value."""
    return {value: wire.Value(f"{prefix}_{value.name}") for value in values}


def value_names(wire: Any, prefix: str) -> dict[Any, str]:
    """The lower-case name of each number of `wire`; 0 (unspecified) is omitted."""
    # 0 is proto3's "unspecified", which has no value in the Python enum.
    names = {number: name.removeprefix(f"{prefix}_") for name, number in wire.items() if number}
    return {number: name.lower() for number, name in names.items()}
