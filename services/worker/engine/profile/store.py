"""The path and the name of the profile of a model on a device."""

import hashlib
import platform
from pathlib import Path

import torch

from services.common.device_profile import DeviceProfile
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.model.shape import shape_of
from services.worker.engine.profile.session import ProfileOutcome

DIGEST_CHARS = 12


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
        hidden_bytes=runner.hidden_bytes_per_token,
        shape=shape_of(runner.geometry, runner.slab_bytes),
        accuracy=outcome.accuracy,
    )
