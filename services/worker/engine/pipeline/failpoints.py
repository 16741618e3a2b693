"""The failpoints of an engine in a change-over, named by the change and by this engine's role.

A name is `engine.CHANGE.PLACE.ROLE`. CHANGE: `merge` if the group gets larger, `split` if it gets
smaller, else `alone`. ROLE, in the larger one of the two groups: `leader` or `follower`.
"""

from collections.abc import Sequence

from services.common import failpoint
from services.core.changeover import frames
from services.core.changeover.configuration import Configuration, GroupStages

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


class ChangeFailpoints:
    """Knows which change is prepared, and which one came last."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._present: Configuration | None = None
        self._asked = self._changed = ("alone", "leader")

    def asked(self, groups: Sequence[GroupStages], place: str) -> None:
        """Pass a place at which a change to `groups` is asked for, or committed."""
        self._asked = self._scope(Configuration.of(self._worker_id, groups))
        self.preparing(place)

    def switching(self, new: Configuration) -> None:
        """The switch to `new` is about to begin."""
        self._changed = self._scope(new)
        self._present = new
        self.changing("switch")

    def preparing(self, place: str) -> None:
        """Pass a place of the preparation."""
        self._hit(place, self._asked)

    def changing(self, place: str) -> None:
        """Pass a place of the change that came last."""
        self._hit(place, self._changed)

    def sending(self, frame: object) -> None:
        """A frame is about to be sent."""
        place = _FRAMES.get(type(frame))
        if place is not None:
            self.changing(place)

    def running(self) -> None:
        """A microbatch is about to run in a configuration that has settled."""
        present = self._present
        if failpoint.any_armed() and present is not None and len(present.stages) > 1:
            role = "leader" if present.leads else "follower"
            failpoint.hit(f"engine.steady.microbatch.{role}")

    @staticmethod
    def resting() -> None:
        """A microbatch is about to run while batch requests rest at this follower."""
        failpoint.hit("engine.shelf.microbatch.follower")

    @staticmethod
    def suspended() -> None:
        """An iteration of a group of one was interrupted, and is to go on."""
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
