"""Graphs of kernels in tests: on the GPU of the tests, or without one."""

from collections.abc import Callable

import torch

from services.worker.engine.model.gpu_graphs import CapturedGraph, CudaGraphCapture
from tests.support.device import ON_GPU


class Recorded:
    """In place of `CudaGraphCapture` where there are no graphs: computes again in place."""

    captures = 0

    def __call__(self, work: Callable[[], torch.Tensor]) -> CapturedGraph:
        Recorded.captures += 1
        output = work()

        def replay() -> None:
            output.copy_(work())

        return CapturedGraph(replay, output)


GraphCapture: type[CudaGraphCapture] | type[Recorded] = CudaGraphCapture if ON_GPU else Recorded
