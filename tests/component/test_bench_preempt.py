"""The probe of preemption drives two real engine processes."""

from pathlib import Path

from benchmarks.probes.preemption import LoadExtent, measure
from tests.support.tiny_models import make_tiny_model


async def test_both_engines_are_measured(tmp_path: Path) -> None:
    """Whether a request meets an iteration of a tiny model is chance; no token may differ by it."""
    model_dir = make_tiny_model(tmp_path / "model")
    extent = LoadExtent(tokens=256, rounds=2, arrivals=2, drops=2, behind=1)
    found = await measure(model_dir, "float32", 64 << 20, extent)
    assert found["tokens"] == 256 and found["layers"] == 3
    assert len(found["iteration_s"]) == 4 and min(found["iteration_s"]) > 0
    assert len(found["drop_prepared_s"]) == 2
    assert set(found["ttft_s"]["single"]) == set(found["ttft_s"]["behind"]) == {"always", "off"}
    assert found["compared_tokens"] > 0
    assert found["different_tokens"] == found["recomputed_tokens"] == 0
    # One that has waited for too long while others run is given up: on a busy machine that happens.
    given_up = found["preempted_iterations"] - found["resumed_iterations"]
    assert given_up <= found["discarded_tokens"] <= given_up * extent.tokens
