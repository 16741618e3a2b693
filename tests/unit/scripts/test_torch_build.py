"""The build of torch in a report of pip."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch_build
from long_step import StepFailed
from torch_build import CPU_BUILD, CUDA_BUILD, build_in, has_nvidia_gpu, question


def report(folder: Path, **metadata: Any) -> Path:
    path = folder / "report.json"
    path.write_text(json.dumps({"install": [{"metadata": metadata}]}))
    return path


@pytest.mark.parametrize(
    ("version", "requirements", "build"),
    [
        ("2.13.0+cpu", ["nvidia-never==1"], CPU_BUILD),
        ("2.13.0", ["filelock", "sympy>=1.13.3"], CPU_BUILD),
        ("2.13.0", ["nvidia-cublas==13.1.0.3; platform_system == 'Linux'"], CUDA_BUILD),
        ("2.13.0+cu130", ['cuda-toolkit[cublas]==13.0.2; platform_system == "Linux"'], CUDA_BUILD),
        ("2.13.0", ["nvidia-x==1; platform_machine == 'another' and x"], CPU_BUILD),
        ("2.13.0", ["nvidia-x==1; extra == 'gpu'"], CPU_BUILD),
        ("2.13.0", None, CPU_BUILD),
    ],
)
def test_the_build_is_identified_by_version_or_dependencies(
    tmp_path: Path, version: str, requirements: list[str] | None, build: Any
) -> None:
    needs = {} if requirements is None else {"requires_dist": requirements}
    assert build_in(report(tmp_path, version=version, **needs)) is build


@pytest.mark.parametrize("text", ["", "[]", '{"install": []}', '{"install": [{}]}'])
def test_a_missing_answer_of_pip_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(StepFailed, match="pip does not report"):
        build_in(tmp_path / "report.json")


def test_the_query_installs_nothing(tmp_path: Path) -> None:
    command = question(["pip", "install"], ["-r", tmp_path], tmp_path / "answer")
    assert command[:3] == ["pip", "install", "--dry-run"]
    assert command[-2:] == ["-r", str(tmp_path)]


def test_a_gpu_is_detected_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "NVIDIA_DRIVER", tmp_path / "nvidia")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_nvidia_gpu()
    (tmp_path / "nvidia").mkdir()
    assert has_nvidia_gpu()
