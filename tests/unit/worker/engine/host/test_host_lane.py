"""Completion times of jobs on the host lane."""

from services.worker.engine.host.lane import HostLane


def test_jobs_are_sequential() -> None:
    lane = HostLane(block_s=0.5)
    lane.occupy(4, 10.0)
    assert lane.free_s(10.0) == 12.0
    lane.occupy(2, 11.0)
    assert lane.free_s(11.0) == 13.0
    assert lane.free_s(20.0) == 20.0


def test_an_unpaced_job_ends_with_its_copy() -> None:
    lane = HostLane(block_s=0.5)
    assert lane.occupy(4, 10.0) == 10.0
    lane.rest()
    assert lane.free_s(10.1) == 10.1


def test_a_paced_job_ends_no_earlier_than_the_modelled_link() -> None:
    lane = HostLane(block_s=0.5, paced=True)
    assert lane.occupy(4, 10.0) == 12.0
    assert lane.occupy(1, 10.0) == 12.5
    lane.rest()
    assert lane.free_s(10.1) == 12.5
    assert lane.occupy(2, 15.0) == 16.0
