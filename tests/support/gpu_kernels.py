"""Graphs of kernels in tests: on the GPU of the tests, or without one."""

from collections.abc import Callable

import torch

from services.worker.engine.model.gpu_graphs import Capture, Captured
from tests.support.device import ON_GPU


class Recorded:
    """In place of `Capture` where there are no graphs: computes again, to the same place."""

    captures = 0

    def __call__(self, work: Callable[[], torch.Tensor]) -> Captured:
        Recorded.captures += 1
        output = work()

        def replay() -> None:
            output.copy_(work())

        return Captured(replay, output)


GraphCapture: type[Capture] | type[Recorded] = Capture if ON_GPU else Recorded
