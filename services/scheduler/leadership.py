"""Whether this instance is the scheduler that the others use: the newest one in etcd."""

from services.common.etcd import Store
from services.common.membership import SERVICES, Directory
from tideserve.common.v1 import record_pb2

NAME = "scheduler"


class Leadership:
    """Follows the instances of all services while `services` runs."""

    def __init__(self, store: Store, incarnation: str) -> None:
        """`incarnation`: of this instance, as it registers."""
        self.incarnation = incarnation
        self.services = Directory(store, SERVICES, record_pb2.ServiceRecord, self._look)
        self.leads = False

    def _look(self) -> None:
        newest = self.services.newest(f"{SERVICES}{NAME}/")
        self.leads = newest is not None and newest.incarnation == self.incarnation
