"""The part of a simulation's configuration that is about groups: policies, links, costs, sizes."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from services.common.config import from_mapping
from services.common.device_profile import DeviceProfile
from services.common.errors import ConfigError
from services.core.groups.layer_map import ModelShape
from services.core.groups.state import ProtocolConfig
from services.core.overload.events import OverloadConfig, OverloadPolicy
from tideserve.sim.change_spec import ChangeCosts, ChangeSpec
from tideserve.sim.network import LinkSpec

T = TypeVar("T")

ABOVE_ZERO = frozenset(
    {
        "bytes_per_s",
        "piece_bytes",
        "verify_bytes_per_s",
        "tick_s",
        "changes_max",
        "smoothing_s",
    }
    | {"num_layers", "layer_bytes", "kv_bytes", "layer_cost"}
)
VALUE_MAX = 2.0**60


def policies_of(value: str | tuple[str, ...], path: Path) -> tuple[OverloadPolicy, ...]:
    """The policies to simulate, one after the other. Raises ConfigError."""
    names = (value,) if isinstance(value, str) else value
    known = {policy.value: policy for policy in OverloadPolicy}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"'overload_policy' in {path} is {name!r}, but must be one of {', '.join(known)},"
                " or a list of them"
            )
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"'overload_policy' in {path} must name each policy once")
    return tuple(known[name] for name in names)


def shape_of(section: dict[str, Any] | None, profile: DeviceProfile, path: Path) -> ModelShape:
    """The model's sizes, from the file or the profile. Raises ConfigError."""
    if section is not None:
        return _section(ModelShape, section, "shape", path)
    if profile.shape is None:
        raise ConfigError(
            f"the device of {path} does not say how large layers are, which the policy 'drop'"
            " needs; add a section 'shape'"
        )
    return profile.shape


def change_spec(
    sections: Mapping[str, dict[str, Any]],
    profile: DeviceProfile,
    shape: ModelShape,
    places: tuple[int, int],
    kv_bytes: int,
    path: Path,
) -> ChangeSpec:
    """What groups that merge are simulated with.

    `sections`: "monitor", "protocol", "link" and "change" of the file; `places`: workers to a host
    and hosts to a rack; `kv_bytes`: a worker's KV cache. Raises ConfigError.
    """
    if profile.hidden_bytes is None:
        raise ConfigError(
            f"the device of {path} does not say how large activations are, which the policy 'drop'"
            " needs; add 'hidden_bytes'"
        )
    link = dict(sections["link"])
    if profile.network_bytes_per_s is not None:
        link.setdefault("bytes_per_s", profile.network_bytes_per_s)
    monitor = sections["monitor"]
    if "policy" in monitor:
        raise ConfigError(f"'policy' in section 'monitor' of {path} goes into 'overload_policy'")
    return ChangeSpec(
        shape=shape,
        arena_bytes=shape.parameter_bytes(1) + kv_bytes,
        hidden_bytes=profile.hidden_bytes,
        monitor=_section(OverloadConfig, monitor, "monitor", path),
        protocol=_section(ProtocolConfig, sections["protocol"], "protocol", path),
        link=_section(LinkSpec, link, "link", path),
        costs=_section(ChangeCosts, sections["change"], "change", path),
        workers_per_host=places[0],
        hosts_per_rack=places[1],
    )


def description_of(change: ChangeSpec) -> dict[str, Any]:
    """All constants, for the report."""
    return asdict(change)


def _section(cls: type[T], data: Mapping[str, Any], name: str, path: Path) -> T:
    source = f"section '{name}' of {path}"
    section = from_mapping(cls, data, source)
    for one in fields(section):  # type: ignore[arg-type]
        value = getattr(section, one.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least = "above 0" if one.name in ABOVE_ZERO else "0 or more"
        if not 0 <= value <= VALUE_MAX or (value == 0 and one.name in ABOVE_ZERO):
            raise ConfigError(f"'{one.name}' in {source} is {value}, but must be {least}")
    return section
