"""Dispatch scores by name."""

import pytest

from services.core.scheduler.dispatch import DISPATCHES, PREFIX, kv_share, least_loaded, score_of


def test_every_dispatch_has_a_score() -> None:
    assert {name: score_of(name) for name in DISPATCHES} == {
        "kv_share": kv_share,
        "least_loaded": least_loaded,
        PREFIX: kv_share,
    }


def test_an_unknown_dispatch_is_an_error() -> None:
    with pytest.raises(ValueError, match="no dispatch 'kvshare'; there are kv_share, least_loaded"):
        score_of("kvshare")
