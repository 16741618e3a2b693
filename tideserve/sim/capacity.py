"""What a simulated group knows of its stages' blocks while these grow, or shrink for a restore."""

from services.core.planner.state import PlannerState
from tideserve.sim.post import Post
from tideserve.sim.preparation import Preparation


class Capacity:
    """The leader's count of its stages, and the answers for which a stage waits."""

    def __init__(self, post: Post, state: PlannerState) -> None:
        self.preparation: Preparation | None = None
        self._post = post
        self._state = state
        self._asked: dict[str, tuple[str, int]] = {}  # worker -> attempt, blocks

    def enter(self) -> None:
        """Begin a configuration."""
        self._asked.clear()

    def set(self, worker_id: str, blocks: int, attempt: str = "") -> None:
        """To the leader: a stage has so many blocks; fewer than before for an `attempt`."""
        self._state.set_capacity(self._stage_of(worker_id), blocks)
        self._asked.pop(worker_id, None)
        if attempt:
            self._asked[worker_id] = attempt, blocks

    def credit(self, worker_id: str, blocks: int) -> None:
        """To the leader: a stage has freed blocks of another leader's requests."""
        self._state.credit(self._stage_of(worker_id), blocks)

    def keep(self) -> None:
        """Answer stages that wait until few enough of their blocks are in use, in each turn."""
        for worker_id, (attempt, blocks) in list(self._asked.items()):
            if self._state.sequence_table.ledger.used[self._stage_of(worker_id) - 1] <= blocks:
                del self._asked[worker_id]
                released = self._state.take_released()
                self._post.send_along(
                    lambda peer: peer.capacity.note_kept, worker_id, attempt, released
                )

    def note_kept(self, worker_id: str, attempt: str, released: tuple[str, ...]) -> None:
        """From the leader: no more blocks of that stage are in use than it said."""
        self._post.release(released)
        preparation = self.preparation
        if worker_id == self._post.name and preparation is not None:
            preparation.note_kept(attempt)

    def send_parameters(self, worker_id: str, attempt: str, size_bytes: int) -> None:
        """A member restores parameters that this one runs."""
        self._post.send_bulk(
            worker_id, size_bytes, lambda peer: peer.capacity.take_parameters, attempt
        )

    def take_parameters(self, attempt: str) -> None:
        """Parameters have arrived."""
        if self.preparation is not None:
            self.preparation.note_fetched(attempt)

    def _stage_of(self, worker_id: str) -> int:
        return [stage.worker_id for stage in self._post.stages].index(worker_id)
