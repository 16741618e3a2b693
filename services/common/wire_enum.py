"""Enumerations of contracts, whose values have the names that they have elsewhere, and a prefix."""

from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeVar

E = TypeVar("E", bound=Enum)


def numbers(values: Iterable[E], wire: Any, prefix: str) -> dict[E, Any]:
    """The number of each value in the enumeration `wire`. Raises ValueError if it lacks one."""
    return {one: wire.Value(f"{prefix}_{one.name}") for one in values}


def words(wire: Any, prefix: str) -> dict[Any, str]:
    """What each number of `wire` stands for, in lower case; 0, which is nothing, is left out."""
    names = {number: name.removeprefix(f"{prefix}_") for name, number in wire.items() if number}
    return {number: name.lower() for number, name in names.items()}
