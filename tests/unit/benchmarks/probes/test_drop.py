"""The drop probe runs on a layout of 48 layers and on a model; times are not judged."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.probes import drop
from services.worker.errors import WorkerError
from tests.support.tiny_models import make_tiny_model


def test_a_drop_of_half_the_layers_takes_few_calls() -> None:
    memory = drop.load_layout(drop.GIB * 3 // 10)
    measured = drop.measure(memory, rounds=1)
    memory.arena.close()
    assert measured["layers"] == drop.LAYERS
    for turn in measured["rounds"]:
        half = drop.LAYERS // 2
        assert turn["drop"]["dropped_bytes"] == (half + 1) * 2 * drop.CHUNK_BYTES
        assert turn["drop"]["map_calls"] <= half + 1
        before, after = turn["drop"]["blocks"]
        assert after > before
        assert turn["mappings"] <= 4 * drop.LAYERS
    at_once, prepared = measured["rounds"]
    assert (at_once["prepared"], prepared["prepared"]) == (False, True)
    assert at_once["drop"]["map_calls"] > 0 == prepared["drop"]["map_calls"]
    assert at_once["drop"]["blocks"] == prepared["drop"]["blocks"]


def test_a_layout_that_the_machine_cannot_hold_is_refused() -> None:
    with pytest.raises(WorkerError, match="choose a smaller layout"):
        drop.load_layout(1 << 50)
    with pytest.raises(WorkerError, match="choose more"):
        drop.load_layout(drop.GIB // 20)


def test_the_command_prints_a_single_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_tiny_model(tmp_path, layers=4)
    arguments = ["--model-dir", str(model_dir), "--dtype", "float32", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["drop", *arguments, "--memory-gib", "0.2"])
    drop.main()
    measured = json.loads(capsys.readouterr().out)
    assert measured["layers"] == 4
    assert len(measured["rounds"]) == 2
    monkeypatch.setattr(sys, "argv", ["drop", *arguments, "--memory-gib", "0.001"])
    with pytest.raises(SystemExit) as ended:
        drop.main()
    assert ended.value.code == 2
    assert "too small" in capsys.readouterr().err
