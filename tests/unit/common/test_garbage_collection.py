"""The cycle collector is restored afterwards."""

import gc

import pytest

from services.common.garbage_collection import freeze_after, gc_paused


def test_collection_is_paused_and_resumed() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="failed"), gc_paused():
        assert not gc.isenabled()
        raise ValueError("failed")
    assert gc.isenabled()


def test_disabled_collection_stays_disabled() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_long_lived_objects_are_frozen() -> None:
    kept: list[object] = []
    try:
        with freeze_after():
            assert not gc.isenabled()
            kept.append([])
        assert gc.isenabled()
        assert all(tracked is not kept[0] for tracked in gc.get_objects())
    finally:
        gc.unfreeze()
