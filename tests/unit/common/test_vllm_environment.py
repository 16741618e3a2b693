"""The environment of vLLM's process."""

from pathlib import Path

from services.common.vllm_environment import compiled_folder, vllm_environment


def test_foreign_modules_and_sizes_are_removed(tmp_path: Path) -> None:
    python = tmp_path / "vllm" / "bin" / "python"
    inherited = {"PATH": "/bin", "PYTHONPATH": "/x", "VLLM_CPU_KVCACHE_SPACE": "9", "HOME": "/h"}
    environment = vllm_environment(inherited, python, threads=3)
    assert not {"PYTHONPATH", "VLLM_CPU_KVCACHE_SPACE"} & environment.keys()
    assert (environment["HOME"], environment["OMP_NUM_THREADS"]) == ("/h", "3")
    assert environment["PATH"] == f"{python.parent}:/bin"


def test_compiled_kernels_are_kept_beside_the_environment(tmp_path: Path) -> None:
    python = tmp_path / "vllm" / "bin" / "python"
    assert compiled_folder(python) == tmp_path / "vllm-compiled"
    assert str(tmp_path) in vllm_environment({}, python, 1)["TORCHINDUCTOR_CACHE_DIR"]
    elsewhere = Path("/nowhere/vllm/bin/python")
    assert "TORCHINDUCTOR_CACHE_DIR" not in vllm_environment({}, elsewhere, 1)


def test_thread_count_follows_the_cpus() -> None:
    assert "OMP_NUM_THREADS" not in vllm_environment({}, Path("/v/bin/python"), 1, on_cpu=False)
