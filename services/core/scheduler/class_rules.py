"""What the class of a request decides at the scheduler; under `fcfs` that is nothing.

Nor is it under `prefill_first`, which is `fcfs` here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from services.core.line_order import LINES, LineOrder, Scheduling, by_deadline, scheduling_setting
from services.core.service import Service, ServiceClass
from services.core.setting import choice, number

ONLINE = (ServiceClass.INTERACTIVE, ServiceClass.STANDARD)
ALL = tuple(ServiceClass)


class Order(StrEnum):
    """Class before class, or one order of interactive and standard: the earliest deadline first."""

    CLASS = "class"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class ClassRules:
    """Settings by class. All but `scheduling` have an effect only unless that is `fcfs`.

    At most `batch_queue_limit` of all places in the queue are for batch requests, each for
    `batch_queue_deadline_s`. The first `batch_groups` groups of a model, by their leaders, take
    nothing else, and the others no batch requests; with 0 every group takes all. One group at least
    is for online requests, and takes all if it is the only one.
    """

    scheduling: Scheduling = scheduling_setting()
    order: Order = choice(
        Order.CLASS,
        Order,
        "Which online request of a tenant is next, with scheduling priority or round_robin. class:"
        " interactive before standard, by arrival; deadline: that whose first token is due first,"
        " ten seconds after its arrival if it has no target. Both after rank; batch comes last."
        " With slo and conserve it is always the deadline, with fcfs and prefill_first the"
        " arrival.",
        expert=True,
    )
    batch_queue_limit: int = number(
        1024,
        "Places of queue_limit that batch requests may take, unless scheduling is fcfs or"
        " prefill_first. An online request takes the place of one of them if all are taken.",
        minimum=0,
        maximum=1_000_000,
    )
    batch_queue_deadline_s: float = number(
        3600.0,
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
        expert=True,
    )

    @property
    def on(self) -> bool:
        """Whether classes decide anything."""
        return self.scheduling.knows_classes

    @property
    def line(self) -> LineOrder:
        """The order of the line."""
        if self.on and self.order is Order.DEADLINE:
            return by_deadline
        return LINES[self.scheduling]

    @property
    def demanding(self) -> tuple[ServiceClass, ...]:
        """Classes whose requests are demand for KV, which may trigger a drop."""
        return ONLINE if self.on else ALL

    def is_batch(self, service: Service) -> bool:
        """Whether a request waits for all online ones, and gives way to them."""
        return self.on and not service.online

    def alike(self, service: Service) -> tuple[ServiceClass, ...]:
        """The classes with which a request shares its pace, and so its Retry-After."""
        return (service.service_class,) if self.on else ALL

    def not_after(self, service: Service) -> tuple[ServiceClass, ...]:
        """The classes whose requests may stand before a new one in the line."""
        if not self.on:
            return ALL
        if service.online and self.line is by_deadline:
            return ONLINE
        return ALL[: ALL.index(service.service_class) + 1]

    def below(self, service: Service) -> Iterator[ServiceClass]:
        """The classes that give their places in a full queue up to a request, the first first."""
        if self.on:
            yield from reversed(ALL[ALL.index(service.service_class) + 1 :])


NO_CLASSES = ClassRules()
