"""Checks of options of `tideserve up` that depend on each other."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from services.common.config import SourcedValue, read_values
from services.common.errors import ConfigError
from services.core.engine_kind import EngineKind
from services.core.overload.events import OverloadPolicy
from services.core.overload.roles import RoleSetting
from services.core.scheduler.dispatch import PREFIX
from services.worker.config import WorkerConfig
from services.worker.errors import cpu_only_torch_error

HOST_MEMORY = "host_memory"


def check_device(device: str, engine: str) -> None:
    """Reject a GPU device early if the installed torch is a CPU build. Raises ConfigError."""
    if device == "cpu" or engine != EngineKind.TIDESERVE:
        return
    installed = version("torch")
    if installed.endswith("+cpu"):
        raise ConfigError(cpu_only_torch_error(installed))


def check_roles(
    roles: str,
    engine: str,
    models: Sequence[tuple[int, Mapping[str, Any]]],
    scheduler: Mapping[str, Any],
) -> None:
    """Reject `roles` that are invalid or would have no effect.

    `models` has the number of workers of each model and their section; `scheduler` is a section.

    Raises:
        ConfigError: with the reason.
    """
    try:
        setting = RoleSetting.parse(roles)
    except ValueError as error:
        raise ConfigError(f"'roles': {error}") from error
    if setting.off:
        return
    reason = ""
    if engine != EngineKind.TIDESERVE:
        reason = f"workers with engine {engine} hand over no requests"
    elif not (caching := [n for n, worker in models if worker.get("prefix_caching", True)]):
        reason = "workers hand over requests only with 'prefix_caching'"
    elif scheduler.get("dispatch", PREFIX) != PREFIX:
        reason = "only dispatch prefix follows roles"
    elif max(caching) < 2:
        every = len(caching) == len(models)
        reason = "no model has two workers" + ("" if every else " with 'prefix_caching'")
    if reason:
        raise ConfigError(
            f"'roles' is {roles}, but {reason}; correct that, or set 'roles' to mixed"
        )


def host_memory_in(section: Mapping[str, Any], default: int | None) -> int:
    """Bytes of the `host_memory` of workers with this section; `AUTO_BYTES` for `auto`.

    Raises:
        ConfigError: if it is invalid.
    """
    if HOST_MEMORY not in section:
        return default or 0
    given = SourcedValue(section[HOST_MEMORY], "section 'worker'")
    parsed: int = read_values(WorkerConfig, {HOST_MEMORY: given})[HOST_MEMORY]
    return parsed


def check_swap(sections: Sequence[Mapping[str, Any]], default: int | None) -> None:
    """Reject `overload_policy: swap` if no model's workers have host memory.

    `sections` has the keys of each model's workers, and `default` is the option `host_memory`.

    Raises:
        ConfigError: if all have none.
    """
    if not any(host_memory_in(section, default) for section in sections):
        raise ConfigError(
            f"'overload_policy' is {OverloadPolicy.SWAP}, which copies KV to host memory, but"
            f" '{HOST_MEMORY}' is 0; set it, for example to auto"
        )
