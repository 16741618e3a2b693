"""Device samplers on the device of the tests, and comparison with the host sampler."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from benchmarks.sampling_rows import Rows
from services.core.planner.batch import SampleSpec
from services.worker.engine.sampling.device_sampler import DeviceSampler, KernelSizes
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.sampler import Sampled, Sampler
from tests.support.device import DEVICE

SIZES = KernelSizes(span=128, lane=8, chunk=512, room=64, wide_room=200)
"""Sizes at which a row of a few hundred tokens has several spans and exceeds the window."""


def device_sampler(
    vocab_size: int, *, slots: int = 256, rows_max: int = 256, sizes: KernelSizes = SIZES
) -> DeviceSampler:
    """A sampler whose kernels run on the device of the tests."""
    return DeviceSampler(
        vocab_size,
        rows_max=rows_max,
        slots=slots,
        max_model_len=1000,
        device=torch.device(DEVICE),
        sizes=sizes,
    )


def patch_interpreter_once(monkeypatch: Any) -> None:
    """Let Triton's interpreter patch its language once, not at every call: half the time."""
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> object:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch(function)
        return interpreter._LangPatchScope()

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)


def sample(rows: Rows, model_dir: Path, on_device: DeviceSampler | None) -> Sampled:
    """Sample all rows by a new sampler, on the host without a device sampler."""
    vocab_size = rows.logits.shape[1]
    sampler = Sampler(vocab_size, Grammars(model_dir, vocab_size), torch.float32, on_device)
    specs = [
        (str(row), SampleSpec(each, index))
        for row, (each, index) in enumerate(zip(rows.terms, rows.indices, strict=True))
    ]
    logits = rows.logits.to(DEVICE if on_device is not None else "cpu", copy=True)
    sampled = Sampled()
    with np.errstate(invalid="ignore", over="ignore"):
        sampler.sample(logits, specs, sampled)
    return sampled


def check_equal(device: Sampled, host: Sampled, rows: Rows) -> None:
    """Tokens and failures are equal; log probabilities differ by rounding."""
    assert device.tokens == host.tokens
    assert device.failed == host.failed
    for name, wanted in host.logprobs.items():
        if name in host.failed or not bool((rows.logits[int(name)] < np.inf).all()):
            continue  # NaN after an overflow of the model
        ((actual,), (exact,)) = device.logprobs[name].unpacked(), wanted.unpacked()
        assert actual.rank == exact.rank
        assert [token for token, _ in actual.top] == [token for token, _ in exact.top]
        numbers = [exact.logprob, *(number for _, number in exact.top)]
        np.testing.assert_allclose(
            [actual.logprob, *(number for _, number in actual.top)], numbers, rtol=1e-6, atol=1e-6
        )
