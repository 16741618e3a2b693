"""Members over real memory, planners and transfers, with integers as a model."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.support.engine_group import EngineGroup
from tests.support.fake_model import FAKE, load_fake

MakeGroup = Callable[..., EngineGroup]


@pytest.fixture
def make_group() -> Iterator[MakeGroup]:
    """Create settled single workers, and free their memory afterwards."""
    made: list[EngineGroup] = []

    def make(
        workers: int = 2, seed: int = 1, host_weights_bytes: int = 0, **options: object
    ) -> EngineGroup:
        config = replace(FAKE, host_weights_bytes=host_weights_bytes)
        made.append(EngineGroup(config, workers, seed, load=load_fake, **options))
        made[-1].settle()
        return made[-1]

    yield make
    for group in made:
        group.close()
