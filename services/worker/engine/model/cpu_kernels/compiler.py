"""Settings and cache of compiled kernels, and operations that numba lacks.

A kernel is a function that numba compiles to machine code for the CPU and the storage dtype of the
model's weights (float32, or bfloat16 as uint16).
"""

import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features, initialize_llvm
from numba.extending import intrinsic

from services.worker.engine.model.cpu_kernels.kernel import Kernel

CACHE_VARIABLE = "TIDESERVE_KERNEL_CACHE"
# Mode of the cache folder, independent of the umask; other users cannot reach files inside.
_PRIVATE = 0o700
log = logging.getLogger(__name__)


def cache_folder(sources: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder for machine code of the kernels in the folder `sources`.

    It is beside the sources, or in the folder `TIDESERVE_KERNEL_CACHE`. Machine code is specific to
    a CPU model; other CPUs ignore it and add their own. The function warns about a folder that
    other users can write to, and returns the folder beside the sources instead.
    """
    # Use a folder per version of the sources: numba does not detect changes of functions in other
    # files that a kernel inlines.
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*.py")):
        digest.update(path.read_bytes())
    own = sources / "__pycache__" / f"kernels-{digest.hexdigest()[:16]}"
    chosen = environment.get(CACHE_VARIABLE)
    if not chosen:
        return own
    # Start with a copy of the kernels beside the sources: a container image contains compiled ones.
    folder = Path(chosen).expanduser().absolute() / own.name
    seed_folder(own, folder)
    # The process executes the cached code, so no other user may be able to write it.
    for checked in (folder.parent, folder):
        reason = untrusted_reason(checked)
        if reason is not None:
            log.warning(
                "the cache of kernels at %s is not used: %s; set %s to a folder that only this"
                " user can write to",
                *(checked, reason, CACHE_VARIABLE),
            )
            return own
    return folder


def untrusted_reason(folder: Path) -> str | None:
    """Return why another user can write to the folder; None if none can or it does not exist."""
    try:
        status = folder.stat()
    except OSError:
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"its mode {stat.S_IMODE(status.st_mode):o} lets others write"
    return None


def seed_folder(seed: Path, folder: Path) -> None:
    """Create `folder`, private to this user, as a copy of `seed`, if any. No effect if it exists.

    The folder appears atomically.
    """
    try:
        if folder.exists():
            return
        folder.parent.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as temporary:
            copied = Path(temporary) / "kernels"
            if seed.is_dir():
                shutil.copytree(seed, copied)
            else:
                copied.mkdir()
            copied.chmod(_PRIVATE)
            copied.rename(folder)
    except OSError as error:
        # Another process has created the folder, or it is not writable and kernels are compiled.
        if not os.path.isdir(folder):  # Path.is_dir raises without permission
            log.info("the cache of kernels starts empty: %s", error)


CACHE_LINE_BYTES = 64
WIDE_FLOATS = 16
"""float32 values in a vector of 512 bits."""


def stored_array(stored: torch.Tensor) -> np.ndarray:
    """Return a view of a tensor in a dtype of `STORED_TYPES` as an array of float32 or uint16."""
    array: np.ndarray = (
        stored if stored.dtype == torch.float32 else stored.view(torch.uint16)
    ).numpy()
    return array


def wide_vectors(features: str) -> str:
    """Return the `features` of a CPU, with vectors of 512 bits enabled if it has them."""
    # By default LLVM prefers vectors of 256 bits, to keep the clock rate of other code high.
    has_wide = "+avx512f" in features.split(",")
    return f"{features},-prefer-256-bit" if has_wide else features


def vector_floats(features: str) -> int:
    """Return the float32 values in the widest vector of a CPU with `features`; at least eight."""
    return WIDE_FLOATS if "+avx512f" in features.split(",") else WIDE_FLOATS // 2


numba.config.CACHE_DIR = str(cache_folder(Path(__file__).parent))
if numba.config.CPU_FEATURES is None:  # the environment may set it
    numba.config.CPU_FEATURES = wide_vectors(get_host_cpu_features())
VECTOR_FLOATS = vector_floats(numba.config.CPU_FEATURES)
"""float32 values in a vector of the kernels."""


def processor_features() -> set[str]:
    """Return the CPU features that kernels may use (+name) or not (-name)."""
    return set(numba.config.CPU_FEATURES.split(","))


def assembly(module: str) -> list[str]:
    """Return the assembly lines of a `module` in LLVM IR, compiled with the options of kernels."""
    initialize_llvm()
    name, features = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name() if name is None else name, features=features, opt=2
    )
    return str(machine.emit_assembly(binding.parse_assembly(module))).splitlines()


def compiled(signature: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a function as a kernel for `signature`; `STORED` stands for each storage dtype.

    Sums may be reordered to vectorize; the order is the same in every call. Divisions by zero are
    not checked, because the check prevents vectorization. A kernel releases the interpreter lock.
    """
    return lambda function: Kernel(function, signature)


@intrinsic
def float32_of(typing_context: Any, number: Any) -> tuple[Any, Callable[..., Any]]:
    """Widen a stored value to float32; a bfloat16 is passed as uint16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        if signature.args[0] == types.float32:
            return arguments[0]
        word = ir.IntType(32)
        return builder.bitcast(
            builder.shl(builder.zext(arguments[0], word), word(16)), ir.FloatType()
        )

    return types.float32(number), generate


@intrinsic
def narrow(typing_context: Any, number: Any, array: Any) -> tuple[Any, Callable[..., Any]]:
    """Convert a float32 to the dtype of `array`: float32, or bfloat16 bits (nearest, ties even)."""
    stored = array.dtype

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        number = arguments[0]
        if stored == types.float32:
            return number
        word = ir.IntType(32)
        bits = builder.bitcast(number, word)
        # Round ties to even: add half of the removed range, minus 1 if the kept part is even.
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.add(builder.add(bits, word(0x7FFF)), odd)
        # The addition could turn a NaN into another value, so select the quiet NaN instead.
        is_nan = builder.fcmp_unordered("uno", number, number)
        chosen = builder.select(is_nan, word(0x7FC0 << 16), rounded)
        return builder.trunc(builder.lshr(chosen, word(16)), ir.IntType(16))

    return stored(types.float32, array), generate


@intrinsic
def larger(typing_context: Any, first: Any, second: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the larger of two float32 that are not NaN; unlike `max`, it vectorizes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        real = ir.FloatType()
        function = builder.module.declare_intrinsic(
            "llvm.maxnum", [real], ir.FunctionType(real, [real, real])
        )
        return builder.call(function, arguments, fastmath=("nnan", "nsz", "reassoc"))

    return types.float32(types.float32, types.float32), generate


@intrinsic
def prefetch(
    typing_context: Any, array: Any, index: Any, offset_bytes: Any
) -> tuple[Any, Callable[..., Any]]:
    """Prefetch the cache line at `offset_bytes` after the start of `array[index]`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        stride = builder.extract_value(made.strides, 0)
        begin = builder.mul(stride, arguments[1])
        fetch(builder, cgutils.pointer_add(builder, made.data, builder.add(begin, arguments[2])))
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


def fetch(builder: Any, address: Any) -> None:
    """Emit a prefetch of a cache line into the L1 cache. Any address is safe."""
    word, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
    )
    to_read, first_cache, data = word(0), word(3), word(1)
    builder.call(function, [builder.bitcast(address, pointer), to_read, first_cache, data])
