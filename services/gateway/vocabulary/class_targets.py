"""What an operator has each class of requests promised."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.config import check_keys, from_mapping
from services.common.errors import ConfigError
from services.core.service import ServiceClass
from services.core.setting import number

TARGET_MS_MAX = 3_600_000
"""Longest target, an hour; the shortest is 1 ms."""
TOKEN_GROUP_MAX = 4096
"""Most tokens over which a target between tokens is averaged."""


@dataclass(frozen=True, slots=True)
class ClassTargets:
    """What requests of a class are promised unless they say otherwise; None promises nothing.

    Times in milliseconds. `tpot_ms` holds on average over `token_group` tokens.
    """

    ttft_ms: float | None = number(None, minimum=1, maximum=TARGET_MS_MAX)
    tpot_ms: float | None = number(None, minimum=1, maximum=TARGET_MS_MAX)
    token_group: int = number(1, minimum=1, maximum=TOKEN_GROUP_MAX)


NO_TARGETS = ClassTargets()
DEFAULT_TARGETS: Mapping[ServiceClass, ClassTargets] = {
    ServiceClass.INTERACTIVE: ClassTargets(ttft_ms=500.0, tpot_ms=100.0)
}


def class_targets(told: Mapping[str, Any]) -> Mapping[ServiceClass, ClassTargets]:
    """The targets of each class: those of the key `classes`, else `DEFAULT_TARGETS`.

    Raises:
        ConfigError: on an unknown class or key, a value out of range, or targets of `batch`.
    """
    check_keys(told, list(ServiceClass), "'classes'")
    targets = dict(DEFAULT_TARGETS)
    for name, entry in told.items():
        if not isinstance(entry, dict):
            raise ConfigError(
                f"'{name}' of 'classes' is {entry!r}, but must be a mapping, such as"
                " {ttft_ms: 500, tpot_ms: 100}"
            )
        found = from_mapping(ClassTargets, entry, f"'{name}' of 'classes'")
        if name == ServiceClass.BATCH and found != NO_TARGETS:
            raise ConfigError("'batch' of 'classes' has no targets; leave it out")
        targets[ServiceClass(name)] = found
    return targets
