"""A profiling session: chooses the batches to measure, fits the cost model and checks the fit.

A session measures all batches in several rounds. The cost model is fitted to the medians of most
batches; held-out batches validate it. The caller runs and times the batches.
"""

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median

import torch

from services.common.device_profile import Accuracy, DeviceProfile, HostLink
from services.core.cost.model import Chunks, CostModel, Sample, fit, mean_relative_error
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.model.catalog import shape_of
from services.worker.engine.profile.batches import (
    BatchLimits,
    Effort,
    fit_batches,
    held_out_batches,
)

ROUNDS_MIN = 5
ROUNDS_MAX = 15
ERROR_MAX = 0.05  # acceptable mean error on held-out batches of a machine without noise
NOISE_FACTOR = 1.5  # acceptable error as a multiple of the noise
QUIET_NOISE_MAX = 0.15
"""With more repeat-to-repeat noise, other processes probably load the machine."""
CPU_SHARE_MIN = 0.8
"""With a smaller share of a processor, other processes slow all repeats of a batch alike."""


@dataclass(frozen=True, slots=True)
class ProfileOutcome:
    """The fit of a complete session. Errors are mean absolute relative errors of medians."""

    model: CostModel
    accuracy: Accuracy
    errors_by_kind: dict[str, tuple[int, float]]  # number of held-out batches, and their error
    fitted: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    rounds: int
    cpu_share: float

    @property
    def error_max(self) -> float:
        """The maximum acceptable error on held-out batches, given the machine's noise."""
        return max(ERROR_MAX, NOISE_FACTOR * self.accuracy.noise)

    @property
    def quiet(self) -> bool:
        """Whether the machine was idle enough for meaningful measurements."""
        return self.accuracy.noise <= QUIET_NOISE_MAX

    @property
    def crowded(self) -> bool:
        """Whether other processes took the processors during the measurements."""
        return self.cpu_share < CPU_SHARE_MIN

    @property
    def passed(self) -> bool:
        """Whether the errors on held-out batches, with and without prefix, are acceptable."""
        accuracy = self.accuracy
        worst = max(accuracy.error, accuracy.error_without_prefix, accuracy.error_with_prefix)
        return worst <= self.error_max


class ProfileSession:
    """Chooses every batch once per round.

    The caller runs `next_batch()` and calls `record` with its duration, until `complete`.
    """

    def __init__(self, effort: Effort, limits: BatchLimits, seed: int = 0) -> None:
        self._rng = Random(seed)
        self._target_s = effort.target_s
        fitted = fit_batches(effort, limits)
        self._kinds = held_out_batches(effort, limits, self._rng)
        held_out = [chunks for points in self._kinds.values() for chunks in points]
        self._fitted_count = len(fitted)
        self._points = [*fitted, *held_out]
        self._durations: list[list[float]] = [[] for _ in self._points]
        self._spent_s = 0.0
        # Indices of the batches left in this round, in reverse order.
        self._round: list[int] = []
        self._rounds_done = 0
        self._rounds_wanted = ROUNDS_MIN
        self._begin_round()

    @property
    def complete(self) -> bool:
        """Whether all rounds are measured."""
        return self._rounds_done >= self._rounds_wanted

    @property
    def progress(self) -> tuple[int, int]:
        """The numbers of measurements that are done, and that the session needs in total."""
        done = sum(map(len, self._durations))
        return done, len(self._points) * self._rounds_wanted

    def next_batch(self) -> Chunks:
        """Return the batch to run next."""
        return self._points[self._round[-1]]

    def record(self, duration_s: float) -> None:
        """Record the duration of `next_batch()`."""
        self._durations[self._round.pop()].append(duration_s)
        self._spent_s += duration_s
        if not self._round:
            self._rounds_done += 1
            # Measure as many rounds as fit into the target time at the present pace.
            affordable = int(self._target_s * self._rounds_done / self._spent_s)
            self._rounds_wanted = max(ROUNDS_MIN, min(ROUNDS_MAX, affordable))
            self._begin_round()

    def outcome(self, cpu_share: float) -> ProfileOutcome:
        """Return the fit and its accuracy; call this when `complete`.

        `cpu_share`: see `Measurer.cpu_share`.
        """
        # Medians are robust against interruptions by other processes.
        samples = [
            Sample(chunks, median(durations))
            for chunks, durations in zip(self._points, self._durations, strict=True)
        ]
        fitted, held_out = samples[: self._fitted_count], samples[self._fitted_count :]
        model = fit(fitted)
        with_prefix = [s for s in held_out if any(prefix for prefix, _ in s.chunks)]
        without = [s for s in held_out if not any(prefix for prefix, _ in s.chunks)]
        by_kind = {}
        rest = held_out
        for kind, points in self._kinds.items():
            own, rest = rest[: len(points)], rest[len(points) :]
            by_kind[kind] = (len(own), mean_relative_error(model, own))
        return ProfileOutcome(
            model=model,
            accuracy=Accuracy(
                error=mean_relative_error(model, held_out),
                error_without_prefix=mean_relative_error(model, without),
                error_with_prefix=mean_relative_error(model, with_prefix),
                noise=repeat_noise(self._durations),
            ),
            errors_by_kind=by_kind,
            fitted=tuple(fitted),
            held_out=tuple(held_out),
            rounds=self._rounds_done,
            cpu_share=cpu_share,
        )

    def _begin_round(self) -> None:
        # Use another order in each round, so that a slow period affects all batches alike.
        self._round = list(range(len(self._points)))
        self._rng.shuffle(self._round)


def repeat_noise(durations: Sequence[Sequence[float]]) -> float:
    """Return the repeat-to-repeat noise of the machine, relative.

    Mean over batches of |median of even repeats − median of odd repeats| / median of all repeats.
    """
    return fmean(
        abs(median(repeats[::2]) - median(repeats[1::2])) / median(repeats) for repeats in durations
    )


DIGEST_CHARS = 12  # of each digest in a profile's file name


def profile_path(folder: Path, config: RunnerConfig, threads: int) -> Path:
    """Return the path of the profile of a model, device, dtype and thread count. Raises OSError.

    Durations do not depend on the values of weights, so `config.json` identifies the model.
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
    """Return the product name of the CPU or GPU."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} processor"


def measured_profile(
    runner: ModelRunner,
    config: RunnerConfig,
    threads: int,
    outcome: ProfileOutcome,
    link: HostLink | None,
) -> DeviceProfile:
    """Build the profile of this model on this device from `outcome`; `link`: if measured."""
    dtype = str(config.dtype).removeprefix("torch.")
    processors = f", {threads} thread{'s' if threads > 1 else ''}"
    return DeviceProfile(
        name=f"{config.model_dir.resolve().name}, {config.device}, {dtype}{processors}",
        source=f"measured on {device_name(config.device)} in {outcome.rounds} rounds",
        model=outcome.model,
        kv_bytes_per_token=runner.kv_bytes_per_token,
        parameter_bytes=runner.parameter_bytes,
        memory_bytes=config.budget_bytes,
        host_link_bytes_per_s=None if link is None else link.bytes_per_s,
        host_link=link,
        hidden_bytes=runner.hidden_bytes_per_token,
        shape=shape_of(runner.geometry, runner.slab_bytes),
        accuracy=outcome.accuracy,
    )
