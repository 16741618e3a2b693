"""The path and the name of the profile of a model on a device."""

import hashlib
import platform
from pathlib import Path

import torch

from services.common.clock import monotonic_s
from services.common.device_profile import DeviceProfile
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.model.shape import shape_of
from services.worker.engine.profile.session import ProfileOutcome

DIGEST_CHARS = 12
LINK_BYTES = 256 << 20


def profile_path(folder: Path, config: RunnerConfig, threads: int) -> Path:
    """The file of the profile of this model, device, dtype and number of threads.

    The weights do not influence the time, so config.json identifies the model. Raises OSError.
    """
    model = hashlib.sha256((config.model_dir / "config.json").read_bytes())
    device = hashlib.sha256(device_name(config.device).encode())
    parts = (
        model.hexdigest()[:DIGEST_CHARS],
        f"{config.device.replace(':', '-')}-{device.hexdigest()[:DIGEST_CHARS]}",
        str(config.dtype).removeprefix("torch."),
        f"{threads}-threads",
    )
    return folder / f"{'_'.join(parts)}.yaml"


def device_name(device: str) -> str:
    """The device's own name."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} processor"


def measured_profile(
    runner: ModelRunner, config: RunnerConfig, threads: int, outcome: ProfileOutcome
) -> DeviceProfile:
    """The profile of this model on this device from `outcome`."""
    dtype = str(config.dtype).removeprefix("torch.")
    processors = f", {threads} thread{'s' if threads > 1 else ''}"
    return DeviceProfile(
        name=f"{config.model_dir.resolve().name}, {config.device}, {dtype}{processors}",
        source=f"measured on {device_name(config.device)} in {outcome.rounds} rounds",
        model=outcome.model,
        kv_bytes_per_token=runner.kv_bytes_per_token,
        parameter_bytes=runner.parameter_bytes,
        memory_bytes=config.budget_bytes,
        host_link_bytes_per_s=_host_link_bytes_per_s(config.device),
        hidden_bytes=runner.hidden_bytes_per_token,
        shape=shape_of(runner.geometry, runner.slab_bytes),
        accuracy=outcome.accuracy,
    )


def _host_link_bytes_per_s(device: str) -> float | None:
    """The rate of copies from pinned host memory to a GPU, the best of five; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    durations_s = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        started_s = monotonic_s()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        durations_s.append(monotonic_s() - started_s)
    return LINK_BYTES / min(durations_s)
