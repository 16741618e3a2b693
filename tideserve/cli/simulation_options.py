"""Reads the YAML file of `tideserve simulate` into the configuration of the simulator."""

from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

from services.common.config import from_mapping, like, read_yaml
from services.common.device_profile import DeviceProfile, load_profile, parse_profile
from services.common.errors import ConfigError
from services.common.setting import values_of
from services.core.groups.layer_map import ModelShape
from services.core.groups.state import ProtocolConfig
from services.core.host.vocabulary import Save
from services.core.overload.events import OverloadConfig, OverloadPolicy, Rebalance
from services.core.overload.roles import RoleSetting
from services.core.planner.config import GPU_LIMITS, IterationConfig
from services.core.scheduler.dispatch import PREFIX
from services.core.scheduler.state_config import StateConfig
from services.core.setting import AUTO_BYTES, choice, nested, number
from services.worker.config import WorkerConfig
from services.worker.host_config import HostConfig
from tideserve.cli.simulated_classes import (
    BatchSection,
    ServiceSection,
    by_load,
    differing,
    with_classes,
)
from tideserve.cli.simulated_workload import SECONDS_MAX, workload_of
from tideserve.sim.change_spec import ChangeCosts, ChangeSpec
from tideserve.sim.cluster import ClusterSpec
from tideserve.sim.delays import Delays
from tideserve.sim.network import LinkSpec
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.workload import Workload

NEVER_MERGING = (OverloadPolicy.RECOMPUTE, OverloadPolicy.SWAP)
"""Policies that need no sizes of layers."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Keys of the file. Sizes are text such as "80GiB" or bytes, durations seconds.

    The device is a `profile` (name or path) or its coefficients in section `cost`. Its KV cache has
    `kv_blocks` blocks, or the part of `memory` (default: 90 % of the device's) without parameters.
    `overload_policy` is a policy, or a list of policies to compare. All but recompute and swap need
    sizes of the model, from the profile or section `shape` with `hidden_bytes` (activation of a
    token).
    `service`, `batch`, `systems` and `loads`: see `simulated_classes`.
    """

    workload: dict[str, Any]
    instances: int = number(1, minimum=1, maximum=10_000)
    duration_s: float = number(60.0, minimum=0.001, maximum=SECONDS_MAX)
    seed: int = number(0, minimum=0, maximum=2**63)
    profile: str | None = None
    cost: dict[str, Any] | None = None
    kv_blocks: int | None = number(None, minimum=1, maximum=2**31)
    memory: int | None = like(WorkerConfig, "memory_bytes", default=None)
    planner: IterationConfig = nested(IterationConfig(**GPU_LIMITS))
    scheduler: StateConfig = nested(StateConfig())
    max_model_len: int = number(32_768, minimum=2, maximum=2**31)
    # Time of an iteration outside the model: planning, sampling, messages.
    iteration_overhead_s: float = number(0.0, minimum=0, maximum=60)
    fast_forward: bool = True
    sample_s: float = number(1.0, minimum=0.001, maximum=3600)
    # Time after the last arrival for running requests to finish.
    drain_s: float = number(3600.0, minimum=0, maximum=SECONDS_MAX)
    delays: Delays = field(default_factory=Delays)
    overload_policy: str | tuple[str, ...] = OverloadPolicy.RECOMPUTE.value
    # When running requests move to other instances with their KV.
    rebalance: Rebalance | None = choice(None, Rebalance)  # None: the default of the policy
    # mixed, auto, or prefill=N,decode=M: which instances compute prompts and which decode.
    roles: str = "mixed"
    # When groups merge and split, the protocol, and the costs of a change.
    monitor: OverloadConfig = field(default_factory=OverloadConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    link: dict[str, Any] = field(default_factory=dict)
    change: ChangeCosts = field(default_factory=ChangeCosts)
    shape: ModelShape | None = None
    hidden_bytes: int | None = number(None, minimum=1, maximum=2**40)
    workers_per_host: int = number(1, minimum=1, maximum=10_000)
    hosts_per_rack: int = number(8, minimum=1, maximum=10_000)
    # Host memory of each instance for copies of KV, with prefix caching; `auto`: as much as its KV
    # cache. `kv_bytes_per_token` with section `cost`.
    host_copies: HostConfig = nested(HostConfig())
    kv_bytes_per_token: int | None = number(None, minimum=1, maximum=2**40)
    # SLO of the requests of `workload`, and a backlog of batch requests beside them.
    service: ServiceSection = field(default_factory=ServiceSection)
    batch: BatchSection | None = None
    # Systems to compare: by name, the keys that differ from the file.
    systems: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Loads to serve in turn: by name, the keys of `workload` that differ.
    loads: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreparedSimulation:
    """Inputs of a simulation; `description` goes to the report.

    `systems`: cluster and load of each system, by name; `notes`: warnings for the user. The P99
    latencies of the system `targets_of` become the targets of online requests in all later systems.
    """

    systems: dict[str, tuple[ClusterSpec, Workload]]
    time_model: CostTimeModel
    duration_s: float
    description: dict[str, Any]
    notes: tuple[str, ...] = ()
    targets_of: str | None = None


def read_simulations(path: Path, seed: int | None) -> dict[str, PreparedSimulation]:
    """The simulations of a file, by name of the load. Raises ConfigError.

    `seed` overrides the seed of the file. A file without `loads` has a single load named "".
    """
    data = read_yaml(path)
    if seed is not None:
        data["seed"] = seed
    return simulations_of(data, path)


def simulations_of(data: dict[str, Any], path: Path) -> dict[str, PreparedSimulation]:
    """As `read_simulations`, of the contents of the file at `path`. Raises ConfigError."""
    return {name: _read(load_data, path) for name, load_data in by_load(data, path)}


def read_simulation(path: Path, seed: int | None) -> PreparedSimulation:
    """The first simulation of a file; see `read_simulations`."""
    return next(iter(read_simulations(path, seed).values()))


def _read(data: dict[str, Any], path: Path) -> PreparedSimulation:
    options = from_mapping(SimulationOptions, data, str(path))
    if not options.systems:
        return prepare(options, path)
    systems, first = {}, None
    for name, given in differing(data, options.systems, path):
        own = from_mapping(SimulationOptions, given, f"system '{name}' of {path}")
        prepared = prepare(own, path)
        (systems[name],) = prepared.systems.values()
        first = first or prepared
    assert first is not None
    description = first.description | {"systems": options.systems}
    if first.targets_of not in (None, *systems):
        raise ConfigError(
            f"'targets_of' in {path} is {first.targets_of!r}, but there are {', '.join(systems)}"
        )
    return replace(first, systems=systems, description=description)


def prepare(options: SimulationOptions, path: Path) -> PreparedSimulation:
    """Build a simulation from validated keys; `path` is for errors. Raises ConfigError."""
    profile = _profile(options, path)
    blocks = _kv_blocks(options, profile, path)
    iteration = replace(options.planner, num_blocks=blocks, cost_model=profile.model)
    ttft = profile.model if options.scheduler.dispatch == PREFIX else None
    given = {
        key: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for key, value in values_of(options).items()
    }
    plain = ClusterSpec(
        instances=options.instances,
        iteration=iteration,
        max_model_len=min(options.max_model_len, blocks * iteration.block_size),
        scheduler=replace(options.scheduler, ttft=ttft),
        delays=options.delays,
        fast_forward=options.fast_forward,
        sample_s=options.sample_s,
        drain_s=options.drain_s,
    )
    service = options.service
    description = {
        "file": path.name,
        "device": profile.name,
        "device_source": profile.source,
        "kv_blocks_per_instance": blocks,
        **given,
    }
    systems = {}
    for policy in _policies(options.overload_policy, path):
        spec = _with_host(plain, options, policy, profile, path)
        roles = _roles(options.roles, path)
        moves = options.rebalance not in (None, Rebalance.OFF) or not roles.off
        if policy not in NEVER_MERGING or moves:
            change = _change(options, policy, profile, blocks, path)
            spec = replace(spec, change=replace(change, roles=roles))
            assert spec.change is not None
            description[policy.value] = asdict(spec.change)
        notes: list[str] = []
        load = workload_of(options.workload, options.duration_s, options.seed, path, notes)
        load = with_classes(load, service.service, options.batch, options.seed, path)
        shared = replace(spec.iteration, prefix_caching=_caches(spec, load, path))
        systems[policy.value] = replace(spec, iteration=shared), load
    time_model = CostTimeModel(profile.model, options.iteration_overhead_s)
    return PreparedSimulation(
        systems, time_model, options.duration_s, description, tuple(notes), service.targets_of
    )


def _caches(spec: ClusterSpec, load: Workload, path: Path) -> bool:
    """Whether prefixes are cached. Raises ConfigError."""
    moves = spec.change is not None and spec.change.ships
    if moves and not spec.iteration.prefix_caching:
        raise ConfigError(
            f"{path} lets requests move, which takes their KV from the prefix cache; set"
            " 'prefix_caching: true'"
        )
    # Skip look-ups, which cost simulation time, if no prompts share a prefix.
    used = load.shares_prefixes or moves or spec.iteration.host is not None
    return spec.iteration.prefix_caching and used


def _with_host(
    spec: ClusterSpec,
    options: SimulationOptions,
    policy: OverloadPolicy,
    profile: DeviceProfile,
    path: Path,
) -> ClusterSpec:
    """The cluster with host memory as configured. Raises ConfigError."""
    copies = options.host_copies
    if policy is OverloadPolicy.SWAP:
        if not copies.host_memory:
            raise ConfigError(
                f"'overload_policy' in {path} is {policy}, but 'host_memory' is 0; set it to auto"
            )
        copies = replace(copies, save=Save.ALL, save_from=0.0)
    if not copies.host_memory:
        return spec
    copies.check(prefix_caching=spec.iteration.prefix_caching)
    token_bytes = options.kv_bytes_per_token or profile.kv_bytes_per_token
    link = copies.host_link_bytes_per_s or profile.host_link_bytes_per_s
    if token_bytes is None or link is None:
        raise ConfigError(
            f"the device of {path} lacks the size of KV or the link to host memory, which"
            " 'host_memory' needs; set 'kv_bytes_per_token' and 'host_link_bytes_per_s'"
        )
    block_bytes = token_bytes * spec.iteration.block_size
    host_bytes = copies.host_memory
    if host_bytes == AUTO_BYTES:
        host_bytes = spec.iteration.num_blocks * block_bytes
    iteration = replace(spec.iteration, host=copies.settings(block_bytes, link))
    return replace(spec, iteration=iteration, host_slots=host_bytes // block_bytes)


def _roles(text: str, path: Path) -> RoleSetting:
    """The key `roles`. Raises ConfigError."""
    try:
        return RoleSetting.parse(text)
    except ValueError as error:
        raise ConfigError(f"'roles' in {path}: {error}") from error


def _policies(value: str | tuple[str, ...], path: Path) -> tuple[OverloadPolicy, ...]:
    """The policies to simulate. Raises ConfigError."""
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


def _change(
    options: SimulationOptions,
    policy: OverloadPolicy,
    profile: DeviceProfile,
    blocks: int,
    path: Path,
) -> ChangeSpec:
    """Settings and costs of merges and splits. Raises ConfigError."""
    shape = options.shape or profile.shape
    if shape is None:
        raise ConfigError(
            f"the device of {path} lacks the sizes of layers, which the policy '{policy}' needs;"
            " add a section 'shape'"
        )
    hidden_bytes = options.hidden_bytes or profile.hidden_bytes
    if hidden_bytes is None:
        raise ConfigError(
            f"the device of {path} lacks the size of activations, which the policy '{policy}'"
            " needs; add 'hidden_bytes'"
        )
    link = dict(options.link)
    if profile.network_bytes_per_s is not None:
        link.setdefault("bytes_per_s", profile.network_bytes_per_s)
    kv_bytes = blocks * options.planner.block_size * shape.num_layers * shape.kv_bytes
    rebalance = options.rebalance
    if rebalance is None and not options.planner.prefix_caching:
        rebalance = Rebalance.OFF  # as workers refuse moves then
    return ChangeSpec(
        shape=shape,
        arena_bytes=shape.parameter_bytes(1) + kv_bytes,
        hidden_bytes=hidden_bytes,
        monitor=replace(options.monitor, policy=policy, rebalance=rebalance),
        protocol=options.protocol,
        link=from_mapping(LinkSpec, link, f"section 'link' of {path}"),
        costs=options.change,
        workers_per_host=options.workers_per_host,
        hosts_per_rack=options.hosts_per_rack,
    )


def _profile(options: SimulationOptions, path: Path) -> DeviceProfile:
    if (options.profile is None) == (options.cost is None):
        raise ConfigError(f"{path} must name a device: give either 'profile' or 'cost', not both")
    if options.profile is not None:
        profile = load_profile(options.profile)
    else:
        data = {"name": "configured", "source": str(path), "cost": options.cost}
        profile = parse_profile(data, str(path))
    model = profile.model
    if min(model.chunk_s(0, 1), model.chunk_s(0, 2)) + options.iteration_overhead_s <= 0:
        raise ConfigError(f"the device in {path} takes no time; raise a coefficient above 0")
    return profile


def _kv_blocks(options: SimulationOptions, profile: DeviceProfile, path: Path) -> int:
    if options.kv_blocks is not None:
        if options.memory is not None:
            raise ConfigError(f"{path} gives both 'kv_blocks' and 'memory'; take one out")
        return options.kv_blocks
    if profile.kv_bytes_per_token is None or profile.parameter_bytes is None:
        raise ConfigError(f"the device of {path} lacks the size of the model; set 'kv_blocks'")
    if options.memory is not None:
        memory_bytes = options.memory
    elif profile.memory_bytes is not None:
        memory_bytes = round(0.9 * profile.memory_bytes)
    else:
        raise ConfigError(f"the device of {path} has no memory size; give 'memory' or 'kv_blocks'")
    block_bytes = profile.kv_bytes_per_token * options.planner.block_size
    blocks = (memory_bytes - profile.parameter_bytes) // block_bytes
    if blocks < 1:
        raise ConfigError(
            f"'memory' in {path} leaves no KV block beside {profile.parameter_bytes} bytes of"
            " parameters; give more"
        )
    return blocks
