"""Kernels for GPUs: on the GPU of the tests, else on the processor, by Triton's interpreter.

Import this before anything that imports a kernel.
"""

import os
from collections.abc import Callable

import pytest
import torch

from tests.support.device import ON_GPU

if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="there is no Triton for this machine")

from services.worker.engine.model.gpu_graphs import Capture, Captured


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
