"""When the copies between device and host end, as the planner predicts it or as it is paced.

In a paced engine the KV of the small model stands for that of the modelled device, which is larger:
a job ends when that device's link would have carried its blocks.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class HostLane:
    """The link between device and host memory; jobs use it one after another.

    `block_s`: seconds per KV block of all layers. `paced`: no job ends before its time.
    """

    block_s: float
    paced: bool = False
    _free_s: float = 0.0  # when the jobs so far will have ended

    def occupy(self, blocks: int, now_s: float) -> float:
        """Add a job; returns the time before which it may not end."""
        self._free_s = self.free_s(now_s) + blocks * self.block_s
        return self._free_s if self.paced else now_s

    def free_s(self, now_s: float) -> float:
        """When the lane will be free, `now_s` or later."""
        return max(self._free_s, now_s)

    def rest(self) -> None:
        """Note that all jobs have ended."""
        if not self.paced:
            self._free_s = 0.0
