"""A GPU samples the same tokens as the host, for all options."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.sampling_rows import Rows, random_rows
from services.core.planner.batch import SampleSpec, SampleTerms
from services.core.request import Sampling
from tests.support.device import DEVICE, ON_GPU
from tests.support.sampling import NO_FOLDER
from tests.support.tiny_models import make_tiny_model

pytest.importorskip("triton", reason="there is no Triton for this machine")
from services.worker.engine.compute import device_sampling
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.model.catalog import geometry_of
from services.worker.engine.model.config import load_config
from services.worker.engine.sampling.device_check import DIFFERENT_MAX, differing_share
from services.worker.engine.sampling.device_row import DeviceRow
from services.worker.engine.sampling.device_sampler import (
    DeviceDraws,
    DeviceSampler,
    KernelSizes,
    device_sampler_bytes,
)
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.sampler import NOTHING_LEFT, Sampled, Sampler
from tests.support.device_sampling import (
    check_equal,
    device_sampler,
    patch_interpreter_once,
    sample,
)

VOCAB = 352
GRAMMARS = ("a+b?", "[a-f]{2,9}", "(.|\n)*", "[^q]*")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny"), vocab=320, layers=1, hidden=8, heads=1, kv_heads=1
    )


@pytest.fixture(autouse=True)
def fast_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        patch_interpreter_once(monkeypatch)


def check_random_rows(seed: int, count: int, model_dir: Path, sampler: DeviceSampler) -> Sampled:
    rows = random_rows(np.random.default_rng(seed), count, VOCAB, GRAMMARS)
    host = sample(rows, model_dir, None)
    check_equal(sample(rows, model_dir, sampler), host, rows)
    return host


@pytest.mark.parametrize("seed", range(3))
def test_rows_with_mixed_options_match_the_host(seed: int, model_dir: Path) -> None:
    sampled = check_random_rows(seed, 64, model_dir, device_sampler(VOCAB))
    # Most rows are not failures, and some of each kind are there.
    assert len(sampled.tokens) > 40
    assert sampled.failed and sampled.logprobs


@pytest.mark.parametrize(
    "sizes",
    [
        KernelSizes(span=32, lane=2, chunk=64, room=16, wide_room=100),
        KernelSizes(span=512, lane=32, chunk=128, room=512, wide_room=512),
    ],
)
def test_results_do_not_depend_on_kernel_sizes(sizes: KernelSizes, model_dir: Path) -> None:
    """Windows that overflow, and windows that hold every row."""
    check_random_rows(100, 24, model_dir, device_sampler(VOCAB, rows_max=10, sizes=sizes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_ten_thousand_rows_with_mixed_options_match_the_host(seed: int, model_dir: Path) -> None:
    check_random_rows(seed, 250, model_dir, device_sampler(VOCAB))


def test_top_p_counts_all_that_top_k_keeps_though_min_p_keeps_few() -> None:
    """The window has all that min-p keeps, but not the mass of which top-p is a share."""
    rng = np.random.default_rng(8)
    logits = torch.from_numpy(rng.normal(0, 0.7, (12, VOCAB)).astype(np.float32))
    terms = [
        SampleTerms(Sampling(top_k=VOCAB - 1 - row, top_p=0.3, min_p=0.5, seed=row))
        for row in range(12)
    ]
    rows = Rows(logits, terms, [0] * 12)
    host = sample(rows, NO_FOLDER, None)
    assert len(set(host.tokens.values())) > 6
    check_equal(sample(rows, NO_FOLDER, device_sampler(VOCAB)), host, rows)


def test_counts_follow_the_sampled_tokens() -> None:
    """Through eviction, a discarded token, preemption and the end of sequences."""
    rng = np.random.default_rng(5)
    on_device = device_sampler(VOCAB, slots=4)
    here, there = (
        Sampler(VOCAB, Grammars(NO_FOLDER, VOCAB), torch.float32, each)
        for each in (None, on_device)
    )
    names = [str(number) for number in range(6)]
    terms = {
        name: SampleTerms(
            Sampling(
                temperature=float(rng.choice([0.0, 1.0])),
                top_k=int(rng.choice([0, 8])),
                seed=number,
                repetition_penalty=float(rng.choice([1.0, 1.3])),
                frequency_penalty=1.5,
                presence_penalty=0.2,
            ),
            tuple(rng.integers(VOCAB, size=9).tolist()),
        )
        for number, name in enumerate(names)
    }
    outputs: dict[str, list[int]] = {name: [] for name in names}
    fresh, unseen = set(names), dict.fromkeys(names, 0)
    for step in range(12):
        batch = [name for name in names if rng.random() < 0.7] or names[:1]
        # Few high logits, so that penalties decide.
        logits = torch.from_numpy(rng.normal(0, 0.3, (len(batch), VOCAB)).astype(np.float32))
        logits[:, :5] += 3
        specs = []
        for name in batch:
            known = outputs[name]
            new = tuple(known[unseen[name] :])
            first = replace(terms[name], output_ids=tuple(known)) if name in fresh else None
            specs.append((name, SampleSpec(first, len(known), () if name in fresh else new)))
            unseen[name] = len(known)
        fresh -= set(batch)
        host, device = Sampled(), Sampled()
        here.sample(logits.clone(), specs, host)
        there.sample(logits.to(DEVICE), specs, device)
        assert device.tokens == host.tokens
        for name in batch:
            outputs[name].append(host.tokens[name])
        if step == 4:
            # The iteration is discarded: the next spec reports another token.
            outputs[batch[0]][-1] = (outputs[batch[0]][-1] + 1) % VOCAB
        if step == 7:
            # Preempted: its terms come again with the whole output.
            fresh.add(batch[-1])
            for sampler in (here, there):
                sampler.keep_only([name for name in names if name != batch[-1]])
    assert max(map(len, outputs.values())) > 6
    assert any(len(set(output)) < len(output) for output in outputs.values())


def test_counts_that_were_not_collected_are_rebuilt() -> None:
    on_device = device_sampler(VOCAB)
    here, there = (
        Sampler(VOCAB, Grammars(NO_FOLDER, VOCAB), torch.float32, each)
        for each in (None, on_device)
    )
    sampling = Sampling(temperature=0.0, frequency_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 9] = 5.0, 4.0
    first = [("a", SampleSpec(SampleTerms(sampling, (1,)), 0))]
    there.start(logits.to(DEVICE), first)  # discarded
    for specs in (first, [("a", SampleSpec(None, 1, (7,)))], [("a", SampleSpec(None, 2, (9,)))]):
        host, device = Sampled(), Sampled()
        here.sample(logits.clone(), specs, host)
        there.start(logits.to(DEVICE), specs)(device)
        assert device.tokens == host.tokens
    assert host.tokens == {"a": 7}


def test_rows_without_numbers_are_greedy_and_masked_rows_fail() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[0, 4] = torch.inf
    logits[1] = -torch.inf
    logits[2] = torch.nan
    drawn = SampleTerms(Sampling(temperature=1.0, top_p=0.5))
    banned = SampleTerms(Sampling(allowed_token_ids=(3,), bad_words=((3,),)))
    rows = Rows(logits, [drawn, drawn, drawn, banned], [0] * 4)
    device = sample(rows, NO_FOLDER, device_sampler(VOCAB))
    assert device.tokens == {"0": 4, "1": 0, "2": 0}
    assert device.failed == {"3": NOTHING_LEFT}
    check_equal(device, sample(rows, NO_FOLDER, None), rows)


@pytest.mark.parametrize("top", [0, 3, 20, VOCAB])
def test_scores_of_prompt_tokens_equal_those_of_the_host(top: int) -> None:
    rng = np.random.default_rng(top)
    logits = torch.from_numpy(rng.normal(0, 3, (21, VOCAB)).round(1).astype(np.float32))
    logits[3] = 0.0
    tokens = rng.integers(VOCAB, size=21).tolist()
    host, device = (
        Sampler(VOCAB, Grammars(NO_FOLDER, VOCAB), torch.float32, each)
        for each in (None, device_sampler(VOCAB, rows_max=16))
    )
    here = host.score(logits, tokens, top)
    there = device.score(logits.to(DEVICE), tokens, top)
    assert there.ids == here.ids
    actual, exact = (np.frombuffer(each.values, "<f4") for each in (there, here))
    np.testing.assert_allclose(actual, exact, rtol=1e-6, atol=1e-6)


def test_bfloat16_logits_are_exact_in_float32() -> None:
    rng = np.random.default_rng(3)
    rows = random_rows(rng, 16, VOCAB)
    low = rows.logits.to(torch.bfloat16)
    exact = rows._replace(logits=low.float())
    host = sample(exact, NO_FOLDER, None)
    device = sample(rows._replace(logits=low), NO_FOLDER, device_sampler(VOCAB))
    check_equal(device, host, exact)


def test_the_memory_is_within_its_bound() -> None:
    for vocab_size, rows, slots in ((1000, 3, 5), (50_000, 8, 2)):
        sampler = DeviceSampler(
            vocab_size, rows_max=rows, slots=slots, max_model_len=9, device=torch.device(DEVICE)
        )
        owned = [*vars(sampler).values(), sampler._counts.table]
        held = sum(each.nbytes for each in owned if isinstance(each, torch.Tensor))
        scores = 4 * min(rows, slots) * vocab_size
        assert held + scores <= device_sampler_bytes(vocab_size, rows, slots, 9)


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_are_compiled_without_spills(capability: int, tmp_path: Path) -> None:
    """In a process without the interpreter; needs no GPU."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.sampling_kernels", str(capability)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 8
    assert all(line.endswith(" 0 0") for line in lines), ended.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [7, 64])
def test_an_engine_compares_the_device_with_the_host(dtype: torch.dtype, slots: int) -> None:
    sampler = device_sampler(VOCAB, slots=slots, rows_max=16)
    assert differing_share(sampler, VOCAB, dtype, torch.device(DEVICE)) == 0


def test_an_engine_notices_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = DeviceSampler.launch

    def without_rules(
        self: DeviceSampler, logits: torch.Tensor, rows: Sequence[DeviceRow]
    ) -> DeviceDraws:
        return launch(self, logits, [row._replace(counts=None, forbidden=None) for row in rows])

    monkeypatch.setattr(DeviceSampler, "launch", without_rules)
    share = differing_share(device_sampler(VOCAB), VOCAB, torch.float32, torch.device(DEVICE))
    assert share > DIFFERENT_MAX


@pytest.mark.parametrize("broken", [False, True])
def test_the_host_samples_where_the_kernels_fail(
    broken: bool, model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compared(*arguments: object) -> float:
        if broken:
            raise RuntimeError("no compiler")
        return 2 * DIFFERENT_MAX

    monkeypatch.setattr(device_sampling, "differing_share", compared)
    monkeypatch.setattr(DeviceSampler, "warm_up", lambda *arguments: None)
    config = RunnerConfig(model_dir, DEVICE, torch.float32, 1 << 28, device_sampling=True)
    geometry = geometry_of(load_config(model_dir), torch.float32)
    assert device_sampling.device_sampler(config, geometry, torch.float32) is None
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "the host samples" in record.getMessage()
    monkeypatch.setattr(device_sampling, "differing_share", lambda *arguments: 0.0)
    assert device_sampling.device_sampler(config, geometry, torch.float32) is not None
