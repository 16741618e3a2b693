"""Rules of the scheduler that depend on a request's service class, and their settings.

Classes are interactive and standard (together: online) and batch. The rules have no effect with the
scheduling policies `fcfs` and `prefill_first`, which differ only on workers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from services.core.queue_order import (
    QUEUE_ORDERS,
    QueueOrder,
    Scheduling,
    by_class,
    by_class_and_deadline,
    by_deadline,
    scheduling_setting,
)
from services.core.scheduler.buckets import Bucketing, BucketSort
from services.core.service import Service, ServiceClass
from services.core.setting import choice, number

ONLINE = (ServiceClass.INTERACTIVE, ServiceClass.STANDARD)
ALL = tuple(ServiceClass)


class Order(StrEnum):
    """Order of online requests: interactive before standard, or by deadline regardless of it."""

    CLASS = "class"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class ClassRules:
    """Settings by class; they have no effect if the policy `scheduling` ignores classes.

    The first `batch_groups` groups of a model, sorted by leader, take only batch requests, and the
    other groups only online requests; 0: every group takes both. At least one group takes online
    requests, and an only group takes both.
    """

    scheduling: Scheduling = scheduling_setting()
    class_order: Order = choice(
        Order.CLASS,
        Order,
        "Order of a tenant's online requests, unless scheduling is fcfs or prefill_first. class:"
        " interactive before standard, within a class by rank and arrival, with slo by deadline;"
        " conserve and bros order by deadline alone, waiting_time by arrival. deadline: earliest"
        " deadline of the first token first, ten seconds after arrival for requests without a"
        " target. Batch comes last. Requests that are late already stand behind the others.",
        expert=True,
    )
    batch_queue_limit: int = number(
        1024,
        "Most queue slots of a model (of queue_limit) for batch requests, unless scheduling is fcfs"
        " or prefill_first. If all slots are taken, an online request displaces a batch request.",
        minimum=0,
        maximum=1_000_000,
    )
    batch_queue_deadline_s: float = number(
        3600.0,
        "Seconds that a batch request may wait, then 504, unless scheduling is fcfs or"
        " prefill_first. The gateway's 'batch_timeout_s' limits waiting and running together.",
        minimum=0.1,
        maximum=86_400,
    )
    batch_groups: int = number(
        0,
        "Groups of each model that take only batch requests, while the others take none, unless"
        " scheduling is fcfs or prefill_first; 0: every group takes all. At least one group takes"
        " online requests, and the only group takes all. For comparisons: either part idles while"
        " the other is overloaded.",
        minimum=0,
        maximum=1024,
        expert=True,
    )
    buckets: Bucketing = choice(
        Bucketing.OFF,
        Bucketing,
        "Whether batch requests start in buckets of similar length (prompt and expected output), a"
        " bucket's requests one after another, while more wait than fit into the KV memory. That"
        " saves padding in engines that pad; others gain little. on: bounds with the least padding;"
        " paper: bounds by bisection, as published. With scheduling fcfs or prefill_first, buckets"
        " order all requests; with waiting_time, none.",
    )
    batch_order: BucketSort = choice(
        BucketSort.FIFO,
        BucketSort,
        "Order in a bucket: fifo: by arrival; sjf: shortest first; ljf: longest first. The oldest"
        " request of a bucket goes first; docs/service-classes.md bounds the delay of the others.",
    )

    @property
    def enabled(self) -> bool:
        """Whether the scheduling policy uses classes."""
        return self.scheduling.uses_classes

    @property
    def queue_order(self) -> QueueOrder:
        """Function that returns the sort key of a request in the queue."""
        if self.enabled and self.class_order is Order.DEADLINE:
            return by_deadline
        if self.scheduling is Scheduling.SLO:
            return by_class_and_deadline
        return QUEUE_ORDERS[self.scheduling]

    @property
    def by_class(self) -> bool:
        """Whether interactive requests go before all standard requests."""
        return self.queue_order in (by_class, by_class_and_deadline)

    @property
    def demand_classes(self) -> tuple[ServiceClass, ...]:
        """Classes that count as demand for KV memory, for which groups merge and drop layers."""
        return ONLINE if self.enabled else ALL

    def is_batch(self, service: Service) -> bool:
        """Whether online requests go before this request and may preempt it."""
        return self.enabled and not service.online

    def has_buckets(self, service: Service) -> bool:
        """Whether buckets order this request among those of its rank."""
        if self.buckets is Bucketing.OFF or self.scheduling is Scheduling.WAITING_TIME:
            return False
        return not (self.enabled and service.online)

    def rate_classes(self, service: Service) -> tuple[ServiceClass, ...]:
        """The classes whose joint dispatch rate determines the Retry-After of a request."""
        return (service.service_class,) if self.enabled else ALL

    def classes_ahead(self, service: Service) -> tuple[ServiceClass, ...]:
        """The classes whose requests may stand before a new request in the queue."""
        if not self.enabled:
            return ALL
        # By deadline, a standard request may precede an interactive request.
        if service.online and self.queue_order is by_deadline:
            return ONLINE
        return ALL[: ALL.index(service.service_class) + 1]

    def displaceable(self, service: Service) -> Iterator[ServiceClass]:
        """The classes that a request may displace from a full queue: those below its own."""
        if self.enabled:
            yield from reversed(ALL[ALL.index(service.service_class) + 1 :])


NO_CLASSES = ClassRules(Scheduling.FCFS)
