"""Checks of options of `tideserve up` that depend on each other."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from services.common.errors import ConfigError
from services.core.engine_kind import EngineKind
from services.core.overload.roles import RoleSetting
from services.core.scheduler.dispatch import PREFIX
from services.worker.errors import cpu_only_torch_error


def check_device(device: str, engine: str) -> None:
    """Reject a GPU device early if the installed torch is a CPU build. Raises ConfigError."""
    if device == "cpu" or engine != EngineKind.TIDESERVE:
        return
    installed = version("torch")
    if installed.endswith("+cpu"):
        raise ConfigError(cpu_only_torch_error(installed))


def check_roles(
    roles: str, engine: str, workers: int, worker: Mapping[str, Any], scheduler: Mapping[str, Any]
) -> None:
    """Reject `roles` that are invalid or would have no effect.

    `workers` is the number of workers of the largest model; `worker` and `scheduler` are sections.

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
    elif not worker.get("prefix_caching", True):
        reason = "workers hand over requests only with 'prefix_caching'"
    elif scheduler.get("dispatch", PREFIX) != PREFIX:
        reason = "only dispatch prefix follows roles"
    elif workers < 2:
        reason = "no model has two workers"
    if reason:
        raise ConfigError(
            f"'roles' is {roles}, but {reason}; correct that, or set 'roles' to mixed"
        )
