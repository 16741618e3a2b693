"""CPU time of a system's processes by kind, as counted by the kernel."""

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import psutil

KINDS = {
    "engine": r"EngineCore|services[./]worker[./](vllm_)?engine",
    "gateway": r"services\.gateway",
    "scheduler": r"services\.scheduler",
    "memmgr": r"services\.memmgr",
    "worker": r"services\.worker",
    "etcd": r"/etcd |^etcd",
    "vllm server": r"vllm\.entrypoints",
}
"""Kinds of processes by substring of the command line; the first match counts."""
ENGINE, OTHER = "engine", "other"


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """CPU seconds by kind of process."""

    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def engine_s(self) -> float:
        """CPU seconds of the processes that run the model."""
        return self.seconds.get(ENGINE, 0.0)

    @property
    def total_s(self) -> float:
        """CPU seconds of all processes."""
        return sum(self.seconds.values())

    def since(self, earlier: "ProcessCost") -> "ProcessCost":
        """The cost since `earlier`."""
        before = earlier.seconds
        return ProcessCost({kind: s - before.get(kind, 0.0) for kind, s in self.seconds.items()})


def read_process_cost(pids: Iterable[int]) -> ProcessCost:
    """CPU time of these processes and their descendants since their start."""
    seconds: dict[str, float] = {}
    for pid in pids:
        for process in _with_children(pid):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                times = process.cpu_times()
                kind = kind_of(" ".join(process.cmdline()))
                seconds[kind] = seconds.get(kind, 0.0) + times.user + times.system
    return ProcessCost(seconds)


def kind_of(command: str) -> str:
    """The kind of a process with this command line."""
    fitting = (kind for kind, mark in KINDS.items() if re.search(mark, command))
    return next(fitting, OTHER)


def _with_children(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
