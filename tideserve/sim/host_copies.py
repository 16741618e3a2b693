"""The copies of a simulated worker between device and host memory, as delays of their link."""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.core.host.vocabulary import BlocksRecalled, BlocksSaved, RecallBlocks, SaveBlocks
from services.core.planner.host_tier import HostTier
from tideserve.sim.engine import Simulation


@dataclass(slots=True)
class HostCopyQueue:
    """Runs the jobs of `tier` one after another; calls `wake` at the end of each.

    A block that the device has lost by the end of its job counts as lost.
    """

    simulation: Simulation
    tier: HostTier
    wake: Callable[[], None]
    free_s: float = 0.0  # when the jobs so far will have ended
    _ended: list[BlocksSaved | BlocksRecalled] = field(default_factory=list)

    def begin(self, command: SaveBlocks | RecallBlocks) -> None:
        """Queue a job."""
        settings = self.tier.settings
        seconds = len(command.blocks) * settings.block_bytes / settings.link_bytes_per_s
        self.free_s = max(self.free_s, self.simulation.now_s) + seconds
        self.simulation.at(self.free_s, self._end, command)

    def take_ended(self) -> list[BlocksSaved | BlocksRecalled]:
        """The ends of jobs since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _end(self, command: SaveBlocks | RecallBlocks) -> None:
        blocks = range(len(command.blocks))
        intact = tuple([self.tier.block_of(command.job, place) is not None for place in blocks])
        kind = BlocksSaved if isinstance(command, SaveBlocks) else BlocksRecalled
        self._ended.append(kind(self.simulation.now_s, command.job, intact))
        self.wake()
