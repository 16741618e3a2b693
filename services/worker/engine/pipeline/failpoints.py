"""The failpoints of an engine in a group change, for fault-injection tests.

A failpoint is a named place in the code where a test can inject a fault. Its name here is
`engine.CHANGE.PLACE.ROLE`. CHANGE is `merge` if the group grows, `split` if it shrinks, else
`alone`. ROLE is `leader` or `follower`: this engine's role in the larger of the old and new group.
"""

from collections.abc import Sequence

from services.common import failpoint
from services.core.changeover import frames
from services.core.changeover.configuration import Configuration, GroupStages
from services.core.shipments.vocabulary import ShipmentSealed

_FRAMES = {
    frames.Drained: "drained",
    frames.Joined: "joined",
    frames.Adopt: "adopt",
    frames.Adopted: "adopted",
    frames.AllAdopted: "all_adopted",
    frames.AllMoved: "all_moved",
    frames.Capacity: "capacity",
    frames.Reserve: "reserve",
    frames.Reserved: "reserved",
    frames.SendKv: "send_kv",
    frames.KvEnded: "kv_ended",
    frames.FreeKv: "free_kv",
    frames.KvFreed: "kv_freed",
}
SHIP_PART_SOURCE, SHIP_PART_TARGET = "engine.ship.part.source", "engine.ship.part.target"
_SHIP_SEALED_SOURCE, _SHIP_SEALED_TARGET = "engine.ship.sealed.source", "engine.ship.sealed.target"


class ChangeFailpoints:
    """Hits failpoints of the last requested change and of the change of the last switch."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._present: Configuration | None = None
        # CHANGE and ROLE of the last requested change, and of the last switch.
        self._requested = self._changed = ("alone", "leader")

    def hit_requested(self, groups: Sequence[GroupStages], place: str) -> None:
        """Note that a change to `groups` was requested or committed, and hit its failpoint."""
        self._requested = self._scope(Configuration.of(self._worker_id, groups))
        self.hit_preparation(place)

    def hit_switch(self, new: Configuration) -> None:
        """Note the switch to `new`, and hit the failpoint right before it."""
        self._changed = self._scope(new)
        self._present = new
        self.hit_change("switch")

    def hit_preparation(self, place: str) -> None:
        """Hit a failpoint of the last requested change."""
        self._hit(place, self._requested)

    def hit_change(self, place: str) -> None:
        """Hit a failpoint of the change of the last switch."""
        self._hit(place, self._changed)

    def hit_frame(self, frame: object) -> None:
        """Hit the failpoint of a frame that is about to be sent, if its type has a failpoint."""
        if isinstance(frame, ShipmentSealed):
            failpoint.hit(_SHIP_SEALED_SOURCE)
        place = _FRAMES.get(type(frame))
        if place is not None:
            self.hit_change(place)

    @staticmethod
    def hit_received(frame: object) -> None:
        """Hit the failpoint of a received frame before it is handled, if its type has one."""
        if isinstance(frame, ShipmentSealed):
            failpoint.hit(_SHIP_SEALED_TARGET)

    def hit_microbatch(self) -> None:
        """Hit the failpoint before a microbatch of a pipeline, outside of group changes."""
        present = self._present
        if failpoint.any_armed() and present is not None and len(present.stages) > 1:
            role = "leader" if present.leads else "follower"
            failpoint.hit(f"engine.steady.microbatch.{role}")

    @staticmethod
    def hit_parked() -> None:
        """Hit the failpoint before a microbatch while this follower keeps parked batch requests."""
        failpoint.hit("engine.shelf.microbatch.follower")

    @staticmethod
    def hit_suspended() -> None:
        """Hit the failpoint after an iteration was suspended."""
        failpoint.hit("engine.suspended.iteration.leader")

    def _scope(self, new: Configuration) -> tuple[str, str]:
        old = self._present
        before, after = len(old.stages) if old is not None else 1, len(new.stages)
        larger = old if old is not None and before > after else new
        role = "leader" if larger.leads else "follower"
        change = "merge" if after > before else "split" if after < before else "alone"
        return change, role

    @staticmethod
    def _hit(place: str, scope: tuple[str, str]) -> None:
        if failpoint.any_armed():
            change, role = scope
            failpoint.hit(f"engine.{change}.{place}.{role}")
