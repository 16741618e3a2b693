"""Memory that the probe of lanes walks through."""

import numpy as np

from benchmarks.probes.lanes import SlabWalk


def test_a_walk_gives_all_of_the_memory_before_it_gives_any_of_it_again() -> None:
    walk = SlabWalk(np.arange(10, dtype=np.uint8))
    assert [list(walk.next(4)) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
