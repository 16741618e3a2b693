"""Frames of other epochs: stale ones are dropped, early ones wait in order."""

import random

import pytest

from services.core.changeover.epoch_fence import EpochFence


def test_a_frame_is_valid_in_its_own_epoch_only() -> None:
    fence: EpochFence[str] = EpochFence(epoch=3)
    assert fence.admits(3, "now")
    assert not fence.admits(2, "stale")
    assert not fence.admits(4, "early")
    assert fence.enter(4) == ["early"]
    assert not fence.admits(3, "late")


def test_a_member_that_skips_an_epoch_drops_its_frames() -> None:
    fence: EpochFence[str] = EpochFence(epoch=1)
    for epoch in (2, 3, 4):
        assert not fence.admits(epoch, f"of {epoch}")
    assert fence.enter(3) == ["of 3"]
    assert list(fence.early) == [(4, "of 4")]
    assert fence.enter(4) == ["of 4"]


@pytest.mark.parametrize("seed", range(20))
def test_every_frame_is_admitted_once_in_order_if_its_epoch_is_entered(seed: int) -> None:
    rng = random.Random(seed)
    fence: EpochFence[int] = EpochFence()
    sent: list[tuple[int, int]] = []
    admitted: list[int] = []
    entered_before = {0}
    for number in range(200):
        if rng.random() < 0.05:
            admitted += fence.enter(fence.epoch + rng.choice((1, 1, 2)))
            entered_before.add(fence.epoch)
        epoch = fence.epoch + rng.choice((-1, 0, 0, 1, 2))
        if epoch >= fence.epoch:
            sent.append((epoch, number))
        if fence.admits(epoch, number):
            admitted.append(number)
    waiting = [(epoch, number) for epoch, number in sent if epoch > fence.epoch]
    assert sorted(fence.early, key=lambda early: early[1]) == waiting
    entered = [frame for frame in sent if frame[0] in entered_before]
    assert sorted(admitted) == sorted(number for _, number in entered)
    for wanted in entered_before:
        admitted_now = [number for number in admitted if (wanted, number) in entered]
        assert admitted_now == sorted(admitted_now), "frames of an epoch have changed places"
