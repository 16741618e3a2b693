"""Determines whether this scheduler instance is the active one: the newest registered in etcd."""

from services.common.etcd import Store
from services.common.membership import SERVICES, Directory
from tideserve.common.v1 import record_pb2

NAME = "scheduler"


class Leadership:
    """Keeps `leads` current by the service records in etcd, while `self.services.run` runs."""

    def __init__(self, store: Store, incarnation: str) -> None:
        """`incarnation` is the id in this instance's own record."""
        self.incarnation = incarnation
        self.services = Directory(store, SERVICES, record_pb2.ServiceRecord, self._update)
        self.leads = False

    def _update(self) -> None:
        # After a restart the old record exists until its lease expires: use the newest record.
        newest = self.services.newest(f"{SERVICES}{NAME}/")
        self.leads = newest is not None and newest.incarnation == self.incarnation
