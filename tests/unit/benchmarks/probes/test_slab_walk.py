"""Memory that the probe of lanes walks through."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.probes.lanes import CACHE_TIMES, SLAB_BYTES_MIN, SlabWalk, slab_bytes


def test_a_walk_gives_all_of_the_memory_before_it_gives_any_of_it_again() -> None:
    walk = SlabWalk(np.arange(10, dtype=np.uint8))
    assert [list(walk.next(4)) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("32768K\n", SLAB_BYTES_MIN),
        ("393216K\n", CACHE_TIMES * (393_216 << 10)),
        ("", SLAB_BYTES_MIN),
    ],
)
def test_a_slab_is_larger_than_the_last_cache(tmp_path: Path, text: str, size_bytes: int) -> None:
    (tmp_path / "size").write_text(text)
    assert slab_bytes(tmp_path / "size") == size_bytes
    assert slab_bytes(tmp_path / "absent") == SLAB_BYTES_MIN
