"""Configuration of the memory manager."""

from dataclasses import dataclass

from services.common.errors import ConfigError
from services.common.service_config import ServiceConfig
from services.core.groups.coordinator import CoordinatorConfig
from services.core.overload.events import OverloadConfig, OverloadPolicy, Rebalance
from services.core.overload.roles import RoleSetting
from services.core.setting import choice, number, option, tcp_port

# The defaults of the state machines, which are also the defaults of the options.
BOUNDS = CoordinatorConfig()
MONITOR = OverloadConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemmgrConfig(ServiceConfig):
    """The options of the memory manager."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = tcp_port(0, "gRPC port; 0: any free port.")
    overload_policy: OverloadPolicy = choice(
        MONITOR.policy,
        OverloadPolicy,
        "What to do when requests overflow the KV cache: drop replicated layers to gain KV cache,"
        " or preempt requests and recompute their KV (recompute). static-pipeline, for comparisons,"
        " merges single workers in pairs once, again when another memory manager becomes the"
        " leader, does not split them when demand falls, and otherwise is like recompute. migrate,"
        " for comparisons, never merges and moves running requests as with rebalance: all, and also"
        " to even out the workers. swap, for comparisons, is like recompute, with workers that copy"
        " all KV to host memory: `tideserve up` sets their `save: all` and `save_from: 0`.",
    )
    rebalance: Rebalance | None = choice(
        None,
        Rebalance,
        "When running requests move to other workers with their KV: never (off); away from workers"
        " that lack KV cache while others have room, before workers merge for them (stuck); also to"
        " make room at a worker for a large request that waits (all). Needs prefix_caching.",
        default_text="with overload_policy drop stuck, else off",
    )
    roles: str = option(
        "mixed",
        "What workers are meant for: mixed (every worker computes prompts and decodes),"
        " prefill=N,decode=M (of each model, N workers compute long prompts and hand the requests"
        " over to M workers), or auto (as many of each as the load needs, while mixed workers would"
        " miss the tightest target of a time per token). Needs prefix_caching and dispatch prefix.",
    )
    overload_dwell_s: float = number(
        MONITOR.overload_dwell_s,
        "Seconds that overload must last before groups merge.",
        minimum=0,
        maximum=600,
    )
    split_dwell_s: float = number(
        MONITOR.split_dwell_s,
        "Seconds that demand must be low before groups split.",
        minimum=0,
        maximum=3600,
    )
    partial_splits: bool = option(
        MONITOR.partial_splits,
        "Split merged groups into smaller merged groups while their KV in use does not fit single"
        " workers.",
    )
    prepare_timeout_s: float = number(
        BOUNDS.protocol.prepare_timeout_s,
        "Seconds that members may take to prepare for a change of groups, which can include"
        " fetching layers.",
        minimum=0.1,
        maximum=3600,
    )
    share_layers: bool = option(
        BOUNDS.protocol.share_layers,
        "Whether workers fetch layers that their own group lacks from workers of other groups,"
        " rather than from the model folder.",
        expert=True,
    )
    ship_drained: bool = option(
        True,
        "Whether running requests of a worker that shuts down move to other workers with their KV"
        " where that takes less time than to compute it again.",
    )
    change_over_timeout_s: float = number(
        BOUNDS.change_over_timeout_s,
        "Seconds that a manual change waits for its members to change over.",
        minimum=0.1,
        maximum=3600,
        expert=True,
    )
    backoff_s: float = number(
        BOUNDS.protocol.backoff_s,
        "Back-off after an aborted change, in seconds; doubles with each consecutive abort.",
        minimum=0.01,
        maximum=600,
        expert=True,
    )

    def __post_init__(self) -> None:
        # Not `super()`: `slots=True` replaces the class that `super()` refers to.
        ServiceConfig.__post_init__(self)
        try:
            RoleSetting.parse(self.roles)
        except ValueError as error:
            raise ConfigError(f"'roles': {error}") from error
