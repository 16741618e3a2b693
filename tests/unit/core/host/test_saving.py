"""The rate at which blocks are saved."""

import pytest

from services.core.host.saving import Pressure, SaveRate
from services.core.host.vocabulary import HostSettings

SETTINGS = HostSettings(block_bytes=1000, link_bytes_per_s=1e6)


def pressure(used: float, empty: int = 100, taken: int = 0, cached: bool = False) -> Pressure:
    return Pressure(used, empty, taken, taken, cached)


def blocks_after(rate: SaveRate, seconds: float, state: Pressure) -> int:
    rate.advance(0.0, state)
    rate.advance(seconds, state)
    return rate.blocks


@pytest.mark.parametrize(
    ("used", "share"), [(0.5, 0.0), (0.6, 0.125), (0.7, 0.25), (0.9, 0.5), (1.0, 0.5)]
)
def test_the_share_grows_with_the_use_of_the_cache(used: float, share: float) -> None:
    assert SaveRate(SETTINGS).share(pressure(used)) == pytest.approx(share)


def test_saves_keep_up_with_online_requests() -> None:
    rate = SaveRate(SETTINGS)
    rate.advance(0.0, pressure(0.55))
    for step in range(1, 200):  # 200 blocks per second
        rate.advance(step / 10, pressure(0.55, taken=20 * step))
    assert rate.share(pressure(0.55)) == pytest.approx(1.2 * 200 * 1000 / 1e6, rel=0.01)
    assert rate.share(pressure(0.45)) == 0


def test_cached_blocks_are_saved_slowly_and_faster_before_they_are_evicted() -> None:
    rate = SaveRate(SETTINGS)
    assert rate.share(pressure(0.1, cached=True)) == pytest.approx(0.05)
    rate.advance(0.0, pressure(0.1))
    rate.advance(2.0, pressure(0.1, taken=400))
    assert rate.share(pressure(0.1, empty=150, cached=True)) == pytest.approx(0.25)
    assert rate.share(pressure(0.1, empty=250, cached=True)) == pytest.approx(0.05)


def test_unused_budget_does_not_accumulate() -> None:
    rate = SaveRate(SETTINGS)
    assert blocks_after(rate, 60.0, pressure(1.0)) == 50  # half of the link for 0.1 s
    rate.spend(50)
    assert rate.blocks == 0
    rate.advance(60.0625, pressure(1.0))
    assert rate.blocks == 31


def test_a_slow_link_saves_a_block_at_a_time() -> None:
    slow = SaveRate(HostSettings(block_bytes=10**6, link_bytes_per_s=1e6))
    assert blocks_after(slow, 1.0, pressure(1.0)) == 0
    slow.advance(2.0, pressure(1.0))
    assert slow.blocks == 1


def test_saves_start_at_once_if_every_block_is_worth_saving() -> None:
    rate = SaveRate(HostSettings(1000, 1e6, save_from=1.0))
    assert rate.ramp(0.89) == 0 and rate.ramp(0.91) == 1
    assert SaveRate(HostSettings(1000, 1e6, save_from=0.0)).ramp(0.45) == pytest.approx(0.5)
