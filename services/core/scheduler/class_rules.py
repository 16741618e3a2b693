"""What the class of a request decides at the scheduler; under `fcfs` that is nothing.

Nor is it under `prefill_first`, which is `fcfs` here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from services.core.line_order import LINES, LineOrder, Scheduling, by_deadline
from services.core.service import Service, ServiceClass

BATCH_QUEUE_LIMIT = 1024
BATCH_QUEUE_DEADLINE_S = 3600.0
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

    scheduling: Scheduling = Scheduling.FCFS
    order: Order = Order.CLASS
    batch_queue_limit: int = BATCH_QUEUE_LIMIT
    batch_queue_deadline_s: float = BATCH_QUEUE_DEADLINE_S
    batch_groups: int = 0

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
