"""Cases in which a recall is faster than a computation."""

import pytest

from services.core.cost.model import CostModel
from services.core.host.recalling import recall_pays
from services.core.host.vocabulary import HostSettings

SETTINGS = HostSettings(block_bytes=1000, link_bytes_per_s=1e6)  # a millisecond per block
TOKEN_S = CostModel(alpha=0.0, beta=0.001, gamma=0.0, lam=0.0)  # 4 ms per block of 4


@pytest.mark.parametrize(
    ("more", "wait_s", "pays"), [(1, 0, False), (2, 0, True), (2, 0.01, False)]
)
def test_a_recall_must_be_faster_than_the_chunk(more: int, wait_s: float, pays: bool) -> None:
    assert recall_pays(SETTINGS, TOKEN_S, 4, 0, more, wait_s) is pays


def test_chunk_cost_grows_with_the_prefix() -> None:
    model = CostModel(alpha=1e-5, beta=0.0001, gamma=0.0, lam=0.0)
    assert not recall_pays(SETTINGS, model, 4, 0, 2, 0.0)
    assert recall_pays(SETTINGS, model, 4, 100, 2, 0.0)


@pytest.mark.parametrize(("more", "pays"), [(3, False), (4, True)])
def test_without_a_cost_model_a_recall_needs_a_few_blocks(more: int, pays: bool) -> None:
    assert recall_pays(SETTINGS, None, 4, 0, more, 1.0) is pays
