import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.memory.layer_slab import LayerSlab
from services.worker.engine.memory.panels import panels_of
from services.worker.engine.model.cpu_kernels import compiler
from services.worker.engine.model.cpu_kernels.skinny_gemm import FEW_ROWS
from services.worker.engine.model.linear import SlabLinear, UpcastScratch
from services.worker.engine.model.loader import DummySource
from services.worker.errors import BudgetTooSmall, DeviceError, ModelError
from tests.support.tiny_models import make_tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", layers=2, dtype=torch.float32)


def load(model_dir: Path, **options: object) -> ModelRunner:
    settings: dict[str, object] = {
        "model_dir": model_dir,
        "device": "cpu",
        "dtype": torch.float32,
        "budget_bytes": 64 << 20,
        "max_batch_tokens": 64,
    }
    return ModelRunner.load(RunnerConfig(**(settings | options)))


def edit_config(model_dir: Path, **changes: object) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_manifest(model_dir: Path) -> None:
    (model_dir / "SHA256SUMS").write_text(
        "".join(
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
            for path in sorted(model_dir.iterdir())
        )
    )


def tensors_of(slabs: dict[str, LayerSlab]) -> dict[str, torch.Tensor]:
    return {name: view.clone() for slab in slabs.values() for name, view in slab.views().items()}


def has_values(loaded: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether a slab's tensor, which may lie in panels, has the values of the file."""
    return torch.equal(loaded, panels_of(saved) if loaded.dim() > saved.dim() else saved)


def test_every_tensor_reaches_its_slab(model_dir: Path) -> None:
    runner = load(model_dir)
    runner.check_invariants()
    loaded = tensors_of(runner.stage_memory.slabs)
    runner.close()
    saved = load_file(model_dir / WEIGHTS)
    assert loaded.keys() == saved.keys()
    assert all(has_values(loaded[name], tensor) for name, tensor in saved.items())


def test_slab_geometry_is_read_from_the_folder(model_dir: Path) -> None:
    runner = load(model_dir, max_model_len=1000)
    geometry = runner.geometry
    runner.close()
    assert (geometry.num_layers, geometry.num_heads, geometry.num_kv_heads) == (2, 4, 2)
    assert (geometry.hidden_size, geometry.head_dim, geometry.vocab_size) == (64, 16, 320)
    assert geometry.max_model_len == 1000
    assert runner.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_sharded_weights_are_loaded(model_dir: Path) -> None:
    saved = load_file(model_dir / WEIGHTS)
    (model_dir / WEIGHTS).unlink()
    names = sorted(saved)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: saved[name] for name in members}, model_dir / file)
    index = {"weight_map": {name: file for file, members in files.items() for name in members}}
    (model_dir / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    write_manifest(model_dir)
    runner = load(model_dir)
    loaded = tensors_of(runner.stage_memory.slabs)
    runner.close()
    assert all(has_values(loaded[name], tensor) for name, tensor in saved.items())
    (model_dir / "SHA256SUMS").unlink()
    (model_dir / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors, which is missing"):
        load(model_dir)


def truncate(model_dir: Path) -> None:
    path = model_dir / WEIGHTS
    path.write_bytes(path.read_bytes()[:1000])


def damage_header(model_dir: Path) -> None:
    path = model_dir / WEIGHTS
    data = bytearray(path.read_bytes())
    data[8:16] = b"\xff" * 8
    path.write_bytes(data)


def remove_tensor(model_dir: Path) -> None:
    saved = load_file(model_dir / WEIGHTS)
    del saved["model.layers.1.mlp.up_proj.weight"]
    save_file(saved, model_dir / WEIGHTS)


def reshape_tensor(model_dir: Path) -> None:
    saved = load_file(model_dir / WEIGHTS)
    saved["model.norm.weight"] = torch.ones(63)
    save_file(saved, model_dir / WEIGHTS)


def keep_pickle_only(model_dir: Path) -> None:
    (model_dir / WEIGHTS).rename(model_dir / "pytorch_model.bin")


def flip_a_weight(model_dir: Path) -> None:
    write_manifest(model_dir)
    path = model_dir / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def add_unlisted_weights(model_dir: Path) -> None:
    write_manifest(model_dir)
    (model_dir / "other.safetensors").write_bytes((model_dir / WEIGHTS).read_bytes())


def list_a_file_outside(model_dir: Path) -> None:
    (model_dir.parent / "outside").write_text("")
    digest = hashlib.sha256(b"").hexdigest()
    (model_dir / "SHA256SUMS").write_text(f"{digest}  ../outside\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "is corrupted"),
        (damage_header, "is corrupted"),
        (remove_tensor, r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (reshape_tensor, r"model\.norm\.weight has shape \[63\]"),
        (keep_pickle_only, "convert the model to safetensors"),
        (flip_a_weight, "does not match SHA256SUMS"),
        (add_unlisted_weights, r"does not list other\.safetensors"),
        (list_a_file_outside, "outside' is not a line of sha256sum"),
        (lambda d: (d / "SHA256SUMS").write_bytes(b"\xff\xfe\n"), "write a new manifest"),
        (lambda d: (d / WEIGHTS).unlink(), r"has no model\.safetensors"),
        (lambda d: (d / "config.json").unlink(), "does not exist"),
        (lambda d: (d / "config.json").write_text("{"), "cannot be read"),
        (lambda d: edit_config(d, architectures=["GPT2LMHeadModel"]), "not supported"),
        (lambda d: edit_config(d, auto_map={"AutoModel": "evil.Model"}), "never executed"),
        (lambda d: edit_config(d, quantization_config={"bits": 4}), "quantized"),
        (lambda d: edit_config(d, hidden_size="many"), r"config\.json is invalid"),
    ],
)
def test_damaged_folders_are_refused(
    model_dir: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(model_dir)
    with pytest.raises(ModelError, match=message):
        load(model_dir)


def test_dummy_weights_need_no_files_and_depend_on_seed_and_name(model_dir: Path) -> None:
    (model_dir / WEIGHTS).unlink()
    loaded = []
    for seed in (1, 1, 2):
        runner = load(model_dir, load_format="dummy", dummy_seed=seed, dummy_std=0.1)
        loaded.append(tensors_of(runner.stage_memory.slabs))
        runner.close()
    first, again, other = loaded
    name = "model.layers.1.mlp.up_proj.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])
    assert float(first[name].std()) == pytest.approx(0.1, rel=0.05)
    assert (first["model.norm.weight"] == 1).all()


def test_dummy_weights_agree_between_dtypes() -> None:
    single, double = torch.empty(30, 20), torch.empty(30, 20, dtype=torch.float64)
    for target in (single, double):
        DummySource(seed=3).fill("w", target)
    assert torch.equal(single.double(), double)


def test_model_digest_covers_parameters_and_configuration(model_dir: Path) -> None:
    digests = []

    def note(**options: object) -> None:
        runner = load(model_dir, **options)
        digests.append(runner.model_digest)
        runner.close()

    note()
    note()
    note(load_format="dummy", dummy_seed=1)
    note(load_format="dummy", dummy_seed=2)
    note(dtype=torch.bfloat16)
    edit_config(model_dir, rms_norm_eps=0.5)
    note()
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


@pytest.mark.parametrize(("dtype", "same"), [(torch.float32, False), (torch.bfloat16, True)])
def test_float32_digest_covers_the_summation_order(
    dtype: torch.dtype, same: bool, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for width in (8, 16):
        monkeypatch.setattr(compiler, "VECTOR_FLOATS", width)
        runner = load(model_dir, dtype=dtype, threads=1)
        digests.append(runner.model_digest)
        runner.close()
    assert (digests[0] == digests[1]) is same


def test_budget_and_device_are_checked(model_dir: Path) -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        load(model_dir, budget_bytes=1 << 20, chunk_bytes=1 << 16)
    runner = load(model_dir, budget_bytes=caught.value.needed_bytes, chunk_bytes=1 << 16)
    assert runner.num_blocks >= 4
    runner.close()
    with pytest.raises(DeviceError, match="choose one of"):
        load(model_dir, device="meta")


@pytest.mark.parametrize("row_count", [1, 5, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scratch_rows", [1, 3, 10, 64, None])
@pytest.mark.parametrize("has_bias", [False, True])
def test_slab_linear_equals_a_linear_layer(
    scratch_rows: int | None, has_bias: bool, row_count: int, compiled: bool
) -> None:
    weight = torch.randn(10, 24).bfloat16()
    bias = torch.randn(10).bfloat16() if has_bias else None
    rows = torch.randn(1, row_count, 24)
    full_bias = None if bias is None else bias.float()
    expected = torch.nn.functional.linear(rows, weight.float(), full_bias)
    if scratch_rows is None:
        layer = SlabLinear(weight.float(), full_bias, None, compiled=compiled)
    else:
        scratch = UpcastScratch(scratch_rows * 24 * 4, torch.float32, torch.device("cpu"))
        layer = SlabLinear(weight, bias, scratch, compiled=compiled)
    torch.testing.assert_close(layer(rows), expected)
