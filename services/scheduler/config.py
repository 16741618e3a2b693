"""Configuration of the scheduler."""

from dataclasses import dataclass

from services.common.config import choice, number, option, tcp_port
from services.common.scheduling_config import SchedulingConfig
from services.core.overtaking import OVERTAKEN_MAX
from services.core.scheduler.class_rules import BATCH_QUEUE_DEADLINE_S, BATCH_QUEUE_LIMIT, Order
from services.core.scheduler.dispatch import DISPATCHES
from services.core.scheduler.group_load import GROWTH_BLOCKS
from services.core.scheduler.state import SPREAD_S


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulingConfig):
    """The options of the scheduler."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = tcp_port(0, "Port of gRPC; 0: any free one.")
    queue_limit: int = number(
        1024, "Requests that may wait; more get 503.", minimum=1, maximum=1_000_000
    )
    queue_deadline_s: float = number(
        120.0,
        "Seconds that a request may wait, counted anew when a worker fails under it; then 504.",
        minimum=0.1,
        maximum=86_400,
    )
    order: str = choice(
        "class",
        Order,
        "Which online request of a tenant is next, with scheduling priority or round_robin. class:"
        " interactive before standard, by arrival; deadline: that whose first token is due first,"
        " ten seconds after its arrival if it has no target. Both after rank; batch comes last."
        " With slo and conserve it is always the deadline, with fcfs and prefill_first the"
        " arrival.",
    )
    batch_queue_limit: int = number(
        BATCH_QUEUE_LIMIT,
        "Places of queue_limit that batch requests may take, unless scheduling is fcfs or"
        " prefill_first. An online request takes the place of one of them if all are taken.",
        minimum=0,
        maximum=1_000_000,
    )
    batch_queue_deadline_s: float = number(
        BATCH_QUEUE_DEADLINE_S,
        "Seconds that a batch request may wait, unless scheduling is fcfs or prefill_first; then"
        " 504. The gateway's 'batch_timeout_s' bounds its waiting and running together.",
        minimum=0.1,
        maximum=86_400,
    )
    batch_groups: int = number(
        0,
        "Groups of each model that take batch requests only, the others taking none, unless"
        " scheduling is fcfs or prefill_first; 0: every group takes all. One group at least takes"
        " online requests, and all if it is the only one. For comparisons: idle time of one kind"
        " is lost to the other.",
        minimum=0,
        maximum=1024,
    )
    overtaken_max: int = number(
        OVERTAKEN_MAX,
        "How often a waiting request may be overtaken by later ones that fit where it does not;"
        " 0: never.",
        minimum=0,
        maximum=2**20,
    )
    growth_blocks: float = number(
        GROWTH_BLOCKS,
        "KV blocks that a group keeps for each request that runs there, so that it can grow, when"
        " another one is to start.",
        minimum=0,
        maximum=1024,
    )
    spread_s: float = number(
        SPREAD_S,
        "Seconds that requests which have lost their worker, or were given back after tokens, wait"
        " for a group with few prompts before it, so that the first group with room does not get"
        " all of them; 0: it does.",
        minimum=0,
        maximum=3600,
    )
    dispatch: str = choice(
        "prefix",
        DISPATCHES,
        "How a group is chosen; keep prefix unless KV is all that counts. prefix: the one with the"
        " lowest predicted TTFT, by the prompts that wait there, the requests that decode there and"
        " what its prefix cache is likely to have; kv_share breaks ties. kv_share: the one with the"
        " smallest share of its KV cache in use, waited for or reserved; with a scheduling"
        " other than fcfs and prefill_first, what online requests wait for counts first."
        " least_loaded: the one with the fewest sequences.",
    )
    cost_profile: str = option(
        "A100-14B",
        "Device profile by which dispatch prefix predicts TTFT, by name or file, such as"
        " `tideserve profile` makes. It says how much a decode costs beside a prompt's token; that"
        " the device is faster or slower altogether changes nothing.",
    )
    gateway_grace_s: float = number(
        10.0,
        "Seconds that the requests of a gateway whose stream ended are kept for its return.",
        minimum=0,
        maximum=3600,
    )
