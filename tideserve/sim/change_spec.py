"""Parameters of changes of groups in a simulation."""

from dataclasses import dataclass, field

from services.core.groups.layer_map import ModelShape
from services.core.groups.state import ProtocolConfig
from services.core.overload.events import OverloadConfig, Rebalance
from services.core.overload.roles import RoleSetting
from services.core.setting import number, seconds
from tideserve.sim.network import LinkSpec


@dataclass(frozen=True, slots=True)
class ChangeCosts:
    """Durations of a change's steps, beside the time that its bytes take on the links.

    A worker pauses for `pause_s` when it maps other layers (KunServe: 5 ms). Members connect in
    `connect_s` and verify fetched parameters at `verify_bytes_per_s`. A transaction takes
    `store_s`; all watchers are notified `watch_s` later; a call takes `call_s`. The coordinator
    evaluates the cluster every `tick_s` and runs at most `changes_max` changes at a time. A change
    fails if its members have not changed over `change_over_timeout_s` after the commit.
    """

    pause_s: float = seconds(0.005)
    connect_s: float = seconds(0.01)
    verify_bytes_per_s: float = number(1e9, minimum=1, maximum=2**60)
    store_s: float = seconds(0.005)
    watch_s: float = seconds(0.005)
    call_s: float = seconds(0.001)
    tick_s: float = seconds(0.1, minimum=0.001)
    changes_max: int = number(32, minimum=1, maximum=10**6)
    change_over_timeout_s: float = seconds(30.0)


@dataclass(frozen=True, slots=True)
class ChangeSpec:
    """Configuration of a simulation in which groups merge and split.

    `arena_bytes` is a worker's memory for parameters and KV; `hidden_bytes` a token's activation.
    There are `workers_per_host` and `hosts_per_rack`; workers that are close to each other merge
    first.
    """

    shape: ModelShape
    arena_bytes: int
    hidden_bytes: int
    monitor: OverloadConfig = field(default_factory=OverloadConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    link: LinkSpec = field(default_factory=LinkSpec)
    costs: ChangeCosts = field(default_factory=ChangeCosts)
    workers_per_host: int = 1
    hosts_per_rack: int = 8
    roles: RoleSetting = field(default_factory=RoleSetting)

    @property
    def ships(self) -> bool:
        """Whether requests move between instances with their KV."""
        return self.monitor.moves is not Rebalance.OFF or not self.roles.off
