"""Settings that `up` derives before it starts anything."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tideserve.cli.cluster_options import ClusterOptions
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError
from tideserve.cli.host import unused_variables
from tideserve.cli.report import Report
from tideserve.cli.stop_signals import StopSignals
from tideserve.cli.up import DRAINING, Missing, Up, drain_time_s, missing_of


@pytest.mark.parametrize(
    ("kind", "section", "drain_s"),
    [
        ("gateway", {}, 30.0),
        ("gateway", {"drain_delay_s": 5, "drain_timeout_s": 60}, 65.0),
        ("worker", {}, 30.0),
        ("worker", {"drain_timeout_s": 600}, 600.0),
        ("worker", {"drain_timeout_s": 0}, 0.0),
        ("worker", {"drain_timeout_s": "long"}, 30.0),
    ],
)
def test_the_stop_timeout_covers_the_drain_time(
    kind: str, section: dict[str, Any], drain_s: float
) -> None:
    assert drain_time_s(DRAINING[kind], section) == drain_s


def test_ignored_environment_options_are_reported() -> None:
    (sentence,) = unused_variables({"TIDESERVE__PORT": "1", "TIDESERVE_URL": "u"})
    assert sentence.startswith("TIDESERVE__PORT: ")
    assert unused_variables({"TIDESERVE_URL": "u", "HOME": "/"}) == []


def test_progress_shows_the_number_of_ready_workers() -> None:
    missing = ["0 of 2 workers have registered", "no group of the model is stable"]
    ready = {"missing": missing, "workers_expected": 2, "workers_registered": 0}
    line = "workers are loading the model (the first start with a dtype compiles kernels): 0 of 2"
    line += " ready"
    assert missing_of(ready) == Missing("; ".join(missing), line)
    line = "workers are waiting for the upstream servers: 0 of 2 ready"
    assert missing_of(ready, in_front=True) == Missing("; ".join(missing), line)
    of_model = missing_of(ready, in_front=True, model="small")
    assert of_model == Missing(f"small: {'; '.join(missing)}", f"small: {line}")
    ready = {"missing": ["the scheduler does not answer"], "workers_expected": None}
    assert missing_of(ready) == Missing(*["the scheduler does not answer"] * 2)


def test_unchanged_progress_is_not_repeated() -> None:
    stream = io.StringIO()
    report = Report(stream)
    report.doing("workers load the model", "1 s")
    report.doing("workers load the model", "2 s")
    assert stream.getvalue() == "  workers load the model (1 s)\n"


@pytest.mark.parametrize(("stopped", "message"), [(True, "  stopped after 0.0 s\n"), (False, "")])
def test_an_interrupted_step_is_not_marked_done(stopped: bool, message: str) -> None:
    stream = io.StringIO()
    with Report(stream).step("Services", lambda: stopped):
        pass
    assert stream.getvalue() == "Services\n" + message


def test_memory_below_the_parameters_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model, cluster = tmp_path / "model", tmp_path / "cluster"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    entry = {"dtype": "F32", "shape": [2**25], "data_offsets": [0, 0]}
    header = json.dumps({"model.layers.0.w": entry}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    options = ClusterOptions(
        model=str(model), memory=10 << 20, cluster_dir=cluster, port=free_port(), threads=1
    )
    up = Up(options, StopSignals())
    with pytest.raises(CommandError, match="10 MiB of memory cannot hold model") as caught:
        up.run()
    assert caught.value.exit_code == EXIT_UNUSABLE
    assert up.run_dir is None and up.cluster.programs == []
    assert not list((cluster / "logs").glob("*.log"))
