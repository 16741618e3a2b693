"""Device profiles: shipped files and round trips."""

from pathlib import Path

import pytest

from services.common.config import read_yaml
from services.common.device_profile import (
    SHIPPED_DIR,
    Accuracy,
    DeviceProfile,
    HostLink,
    load_profile,
    shipped_names,
    store_profile,
)
from services.common.errors import ConfigError
from services.core.cost.model import Coefficients, CostModel
from services.core.groups.layer_map import ModelShape

MEASURED = [name for name in shipped_names() if load_profile(name).accuracy is not None]
ESTIMATES = [name for name in shipped_names() if name not in MEASURED]


def test_shipped_profiles_are_valid() -> None:
    assert set(ESTIMATES) == {
        "A100-14B",
        "A100-40G-7B",
        "A100-40G-13B",
        "A800-14B",
        "H100-14B",
        "H800-14B",
    }
    assert set(MEASURED) == {"H200-14B", "H200-7B"}


@pytest.mark.parametrize("name", MEASURED)
def test_measured_profiles_have_prediction_errors(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name and profile.source.startswith("measured on NVIDIA H200")
    assert profile.accuracy is not None and profile.accuracy.error < 0.1
    assert profile.parameter_bytes is not None and profile.shape is not None
    layers = profile.shape.num_layers * profile.shape.layer_bytes
    whole = layers + profile.shape.embedding_bytes + profile.shape.head_bytes
    assert whole == pytest.approx(profile.parameter_bytes, rel=1e-3)


@pytest.mark.parametrize("name", ESTIMATES)
def test_shipped_estimates_follow_from_their_derivation(name: str) -> None:
    """The formulas at the top of each file give its figures."""
    profile = load_profile(name)
    assert profile.name == name
    data = read_yaml(SHIPPED_DIR / f"{name}.yaml")["derivation"]
    model = data["model"]
    heads, kv_heads = (model[key] * model["head_dim"] for key in ("heads", "kv_heads"))
    layers, hidden = model["layers"], model["hidden"]
    layer_parameters = layers * (
        2 * hidden * heads + 2 * hidden * kv_heads + 3 * hidden * model["intermediate"]
    )
    head_parameters = model["vocabulary"] * hidden
    memory = data["hbm_bytes_per_s"] * data["hbm_efficiency"]
    lam = 2 * (layer_parameters + head_parameters) / memory + data["overhead_s"]
    gamma = lam + data["chunk_overhead_s"]
    kv_bytes = 2 * layers * kv_heads * 2
    peak = data["peak_flop_per_s"]
    expected = CostModel(
        alpha=4 * layers * heads / (peak * data["attention_efficiency"]),
        beta=2 * layer_parameters / (peak * data["linear_efficiency"]),
        gamma=gamma,
        lam=lam,
        decode=Coefficients(kv_bytes / memory, 0.0, gamma),
        kappa=kv_bytes / memory,
    )
    for batch in ([(0, 2048)], [(1000, 1)], [(4000, 100), *[(700, 1)] * 50]):
        assert profile.model.batch_s(batch) == pytest.approx(expected.batch_s(batch), rel=1e-3)
    assert profile.kv_bytes_per_token == kv_bytes
    assert profile.parameter_bytes == 2 * (layer_parameters + 2 * head_parameters)
    layer_bytes, head_bytes = 2 * layer_parameters // layers, 2 * head_parameters
    assert profile.hidden_bytes == 2 * hidden
    assert profile.shape == ModelShape(
        num_layers=layers,
        layer_bytes=layer_bytes,
        embedding_bytes=head_bytes,
        head_bytes=head_bytes,
        tied_embeddings=False,
        kv_bytes=kv_bytes // layers,
        layer_cost=layer_bytes,
        head_cost=head_bytes,
    )


@pytest.mark.parametrize("decode", [None, Coefficients(1e-7, 0.0, 0.02)])
@pytest.mark.parametrize("accuracy", [None, Accuracy(0.04, 0.03, 0.05, 0.01)])
def test_a_stored_profile_round_trips(
    tmp_path: Path, decode: Coefficients | None, accuracy: Accuracy | None
) -> None:
    model = CostModel(1.5e-9, 1e-4, 0.03, 0.02, decode, 1e-8)
    shape = ModelShape(2, 10, 4, 3, True, 5, 1.5, 0.0, 0.5)
    profile = DeviceProfile(
        *("mine", "a test", model),
        kv_bytes_per_token=7,
        shape=shape,
        accuracy=accuracy,
        host_link=None if accuracy is None else HostLink(1e9, 2e9, 3e9, 4e9),
    )
    path = tmp_path / "deeper" / "mine.yaml"
    store_profile(profile, path)
    store_profile(profile, path)
    assert load_profile(path) == profile
    assert [file.name for file in path.parent.iterdir()] == ["mine.yaml"]


def test_the_host_link_is_that_of_large_copies_in_the_slower_direction() -> None:
    assert HostLink(1e9, 7e9, 3e9, 4e9).bytes_per_s == 4e9


def test_a_slowed_device_has_a_slower_host_link(tmp_path: Path) -> None:
    model = CostModel(1.5e-9, 1e-4, 0.03, 0.02)
    path = tmp_path / "mine.yaml"
    store_profile(DeviceProfile("m", "t", model, host_link=HostLink(1e9, 2e9, 3e9, 4e9)), path)
    assert load_profile(f"{path}:2").host_link == HostLink(5e8, 1e9, 1.5e9, 2e9)


GOOD_COST = "cost: {alpha_s: 1.0e-9, beta_s: 1.0e-4, gamma_s: 0.02, lambda_s: 0.01}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nsource: y\n", "'cost' is missing"),
        ("name: x\nsource: y\ncost: {alpha_s: 1.0}\n", "'beta_s' is missing"),
        ("name: x\nsource: y\n" + GOOD_COST.replace("0.01", "0.03"), "must not exceed 'gamma_s'"),
        ("name: x\nsource: y\n" + GOOD_COST.replace("0.02", "-1.0"), "gamma_s"),
        ("name: x\nsource: y\nspeed: 3\n" + GOOD_COST, "unknown configuration key 'speed'"),
        ("a: [", "not valid YAML"),
    ],
)
def test_an_invalid_file_is_a_short_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_profile(path)


def test_an_unknown_name_lists_the_known_names() -> None:
    with pytest.raises(ConfigError, match="A100-14B, A100-40G-13B, A100-40G-7B, A800-14B"):
        load_profile("B200-14B")


def test_a_slowdown_scales_predicted_times(tmp_path: Path) -> None:
    profile, slow = load_profile("A100-14B"), load_profile("A100-14B:2.5")
    assert slow.name == "A100-14B:2.5"
    for batch in ([(0, 2048)], [(1000, 1)], [(4000, 100), *[(700, 1)] * 50]):
        assert slow.model.batch_s(batch) == pytest.approx(2.5 * profile.model.batch_s(batch))
    assert slow.peer_link_bytes_per_s == pytest.approx((profile.peer_link_bytes_per_s or 0) / 2.5)
    assert slow.shape == profile.shape
    assert load_profile("A100-14B:1") == profile
    store_profile(profile, tmp_path / "own.yaml")
    assert load_profile(f"{tmp_path / 'own.yaml'}:2.5") == slow


@pytest.mark.parametrize("name", ["A100-14B:0", "A100-14B:1001"])
def test_an_out_of_range_slowdown_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="the slow-down factor is"):
        load_profile(name)


def test_a_slowdown_of_an_unknown_profile_names_the_profile() -> None:
    with pytest.raises(ConfigError, match="unknown device profile 'nothing'; choose from"):
        load_profile("nothing:2")
