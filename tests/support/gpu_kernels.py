"""Kernel graphs in tests, with or without a GPU."""

from collections.abc import Callable

import torch

from services.worker.engine.model.gpu_graphs import CapturedGraph, CudaGraphCapture
from tests.support.device import ON_GPU


class Recorded:
    """Replaces `CudaGraphCapture` without a GPU: a replay computes again, in place."""

    captures = 0

    def __call__(self, work: Callable[[], torch.Tensor]) -> CapturedGraph:
        Recorded.captures += 1
        output = work()

        def replay() -> None:
            output.copy_(work())

        return CapturedGraph(replay, output)


GraphCapture: type[CudaGraphCapture] | type[Recorded] = CudaGraphCapture if ON_GPU else Recorded
