"""Default SLO targets (TTFT, TPOT) of each service class, from the operator's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.config import check_keys, from_mapping
from services.common.errors import ConfigError
from services.core.service import ServiceClass
from services.core.setting import number

TARGET_MS_MAX = 3_600_000
"""Maximum target, an hour; the minimum is 1 ms."""
TOKEN_GROUP_MAX = 4096
"""Maximum tokens over which a TPOT target is averaged."""


@dataclass(frozen=True, slots=True)
class ClassTargets:
    """Default targets of a class, for requests without targets; None means no target.

    TTFT and TPOT are in milliseconds; `tpot_ms` applies to the mean over `token_group` tokens.
    """

    ttft_ms: float | None = number(None, minimum=1, maximum=TARGET_MS_MAX)
    tpot_ms: float | None = number(None, minimum=1, maximum=TARGET_MS_MAX)
    token_group: int = number(1, minimum=1, maximum=TOKEN_GROUP_MAX)


NO_TARGETS = ClassTargets()
DEFAULT_TARGETS: Mapping[ServiceClass, ClassTargets] = {
    ServiceClass.INTERACTIVE: ClassTargets(ttft_ms=500.0, tpot_ms=100.0)
}


def class_targets(configured: Mapping[str, Any]) -> Mapping[ServiceClass, ClassTargets]:
    """Parse the setting `classes`; classes that it omits keep their `DEFAULT_TARGETS`.

    Raises:
        ConfigError: on an unknown class or key, a value out of range, or targets of `batch`.
    """
    check_keys(configured, list(ServiceClass), "'classes'")
    targets = dict(DEFAULT_TARGETS)
    for name, entry in configured.items():
        if not isinstance(entry, dict):
            raise ConfigError(
                f"'{name}' of 'classes' is {entry!r}, but must be a mapping, such as"
                " {ttft_ms: 500, tpot_ms: 100}"
            )
        entry_targets = from_mapping(ClassTargets, entry, f"'{name}' of 'classes'")
        # Batch work runs in time that online requests leave, so it cannot have targets.
        if name == ServiceClass.BATCH and entry_targets != NO_TARGETS:
            raise ConfigError("'batch' of 'classes' has no targets; leave it out")
        targets[ServiceClass(name)] = entry_targets
    return targets
