"""Device profiles: the cost model, link speeds and sizes of a model on a device.

A profile is a YAML file, measured by `tideserve profile` or shipped in `device_profiles/`. The
shipped profiles were measured on a GPU, or are estimates that name the published figures they are
derived from.

`A100-14B:2` is a device like A100-14B that is slower by a factor of 2. With such simulated devices,
the same processors can run twice as many workers at the pace of their devices.
"""

import os
import re
import tempfile
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from services.common.config import from_mapping, read_yaml
from services.common.errors import ConfigError
from services.core.cost.model import Coefficients, CostModel
from services.core.groups.layer_map import ModelShape
from services.core.setting import number

SHIPPED_DIR = Path(__file__).parent / "device_profiles"
SUFFIX = ".yaml"
SLOWDOWN = re.compile(r"(.+):(\d+(?:\.\d+)?)")
SLOWDOWN_MAX = 1000.0
SECONDS_MAX = 3600.0
BYTES_MAX = 2.0**60
TOKENS_MAX = 10**9


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of a measured profile on batches that it was not fitted to.

    Mean absolute relative errors; `noise` is the difference between two measurements of the same
    batches on the same machine.
    """

    error: float
    error_without_prefix: float
    error_with_prefix: float
    noise: float


@dataclass(frozen=True, slots=True)
class HostLink:
    """Measured bandwidth between device and host memory, in bytes/s, of 1 MiB and of 64 MiB."""

    small_to_host: float
    large_to_host: float
    small_to_device: float
    large_to_device: float

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth of large copies in the slower direction."""
        return min(self.large_to_host, self.large_to_device)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A model on a device. Links are in bytes/s per direction; None if not measured.

    `peer` is the link to another device of the cluster, `host` the link to host memory (for host
    copies of KV; `host_link` has the measurements). `shape` and `hidden_bytes` (the activation of a
    token) are used to divide the model into pipeline stages. `source` names the origin of the
    figures.
    """

    name: str
    source: str
    model: CostModel
    kv_bytes_per_token: int | None = None
    parameter_bytes: int | None = None
    memory_bytes: int | None = None
    host_link_bytes_per_s: float | None = None
    peer_link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    hidden_bytes: int | None = None
    shape: ModelShape | None = None
    accuracy: Accuracy | None = None
    host_link: HostLink | None = None


def shipped_names() -> list[str]:
    """Names of the profiles that are part of tideserve."""
    return sorted(path.stem for path in SHIPPED_DIR.glob(f"*{SUFFIX}"))


def split_slowdown(text: str) -> tuple[str, float]:
    """A profile's name or path, and the factor by which it is slowed down."""
    match = SLOWDOWN.fullmatch(text)
    return (match[1], float(match[2])) if match else (text, 1.0)


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """The profile in a file, or the shipped profile of that name; slowed down by `:FACTOR`.

    Raises:
        ConfigError: if it does not exist or cannot be read.
    """
    name, slowdown = split_slowdown(str(name_or_path))
    path = Path(name).expanduser()
    if path.name == name and not path.is_file():
        path = SHIPPED_DIR / f"{name}{SUFFIX}"
        if not path.is_file():
            raise ConfigError(
                f"unknown device profile '{name}'; choose from"
                f" {', '.join(shipped_names())}, or give the path of a file"
            )
    profile = parse_profile(read_yaml(path), str(path))
    if slowdown == 1:
        return profile
    if not 1 / SLOWDOWN_MAX <= slowdown <= SLOWDOWN_MAX:
        raise ConfigError(
            f"'{name_or_path}': the slow-down factor is {slowdown:g}, but must be"
            f" {1 / SLOWDOWN_MAX:g} to {SLOWDOWN_MAX:g}"
        )
    return _slowed(profile, slowdown)


def _slowed(profile: DeviceProfile, factor: float) -> DeviceProfile:
    links = ("host_link_bytes_per_s", "peer_link_bytes_per_s", "network_bytes_per_s")
    rates = {name: getattr(profile, name) for name in links}
    link = profile.host_link
    return replace(
        profile,
        name=f"{profile.name}:{factor:g}",
        model=profile.model.slowed(factor),
        host_link=link and HostLink(*(rate / factor for rate in astuple(link))),
        **{name: rate / factor for name, rate in rates.items() if rate is not None},
    )


def parse_profile(data: dict[str, Any], source: str) -> DeviceProfile:
    """The profile of a mapping; `source` names the mapping in errors. Raises ConfigError."""
    file = from_mapping(_ProfileFile, data, source)
    cost = file.cost
    if cost.lambda_s > cost.gamma_s:
        raise ConfigError(
            f"'lambda_s' in {source} is {cost.lambda_s}, but must not exceed 'gamma_s'"
            f" ({cost.gamma_s}): a batch cannot save more than a chunk costs"
        )
    decode = None
    if cost.decode is not None:
        decode = Coefficients(cost.decode.alpha_s, cost.decode.beta_s, cost.decode.gamma_s)
    model = CostModel(
        cost.alpha_s,
        cost.beta_s,
        cost.gamma_s,
        cost.lambda_s,
        decode,
        cost.kappa_s,
        cost.knee_tokens,
        cost.mu_s,
    )
    names = (field.name for field in fields(DeviceProfile) if field.name != "model")
    return DeviceProfile(model=model, **{name: getattr(file, name) for name in names})


def store_profile(profile: DeviceProfile, path: Path) -> None:
    """Write the profile atomically: readers see the old or the new file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Use the same folder, because a rename between file systems is not atomic.
    descriptor, fresh = tempfile.mkstemp(dir=path.parent, prefix=".profile-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yaml.safe_dump(to_mapping(profile), file, sort_keys=False)
        Path(fresh).replace(path)
    except OSError:
        Path(fresh).unlink(missing_ok=True)
        raise


def to_mapping(profile: DeviceProfile) -> dict[str, Any]:
    """The mapping that `parse_profile` reads back to an equal profile."""
    model = profile.model
    cost: dict[str, Any] = {
        "alpha_s": model.alpha,
        "beta_s": model.beta,
        "gamma_s": model.gamma,
        "lambda_s": model.lam,
        "kappa_s": model.kappa,
        "knee_tokens": model.knee,
        "mu_s": model.mu,
    }
    if model.decode is not None:
        cost["decode"] = {
            "alpha_s": model.decode.alpha,
            "beta_s": model.decode.beta,
            "gamma_s": model.decode.gamma,
        }
    values = {
        name: value
        for name, value in asdict(profile).items()
        if value is not None and name != "model"
    }
    return values | {"cost": cost}


@dataclass(frozen=True, slots=True)
class _DecodeSection:
    alpha_s: float = number(minimum=0, maximum=SECONDS_MAX)
    beta_s: float = number(minimum=0, maximum=SECONDS_MAX)
    gamma_s: float = number(minimum=0, maximum=SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class _CostSection:
    alpha_s: float = number(minimum=0, maximum=SECONDS_MAX)
    beta_s: float = number(minimum=0, maximum=SECONDS_MAX)
    gamma_s: float = number(minimum=0, maximum=SECONDS_MAX)
    lambda_s: float = number(minimum=0, maximum=SECONDS_MAX)
    kappa_s: float = number(0.0, minimum=0, maximum=SECONDS_MAX)
    knee_tokens: int = number(0, minimum=0, maximum=TOKENS_MAX)
    mu_s: float = number(0.0, minimum=0, maximum=SECONDS_MAX)
    decode: _DecodeSection | None = None


@dataclass(frozen=True, slots=True)
class _ProfileFile:
    name: str
    source: str
    cost: _CostSection
    kv_bytes_per_token: int | None = number(None, minimum=1, maximum=BYTES_MAX)
    parameter_bytes: int | None = number(None, minimum=1, maximum=BYTES_MAX)
    memory_bytes: int | None = number(None, minimum=1, maximum=BYTES_MAX)
    host_link_bytes_per_s: float | None = number(None, minimum=1, maximum=BYTES_MAX)
    peer_link_bytes_per_s: float | None = number(None, minimum=1, maximum=BYTES_MAX)
    network_bytes_per_s: float | None = number(None, minimum=1, maximum=BYTES_MAX)
    hidden_bytes: int | None = number(None, minimum=1, maximum=BYTES_MAX)
    shape: ModelShape | None = None
    accuracy: Accuracy | None = None
    host_link: HostLink | None = None
    derivation: dict[str, Any] | None = None  # for human readers: the origin of an estimate
