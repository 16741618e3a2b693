"""Shared by the kernels: their compilation, and operations that numba lacks."""

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
# Independent of the umask. Files that numba makes inside get its mode.
_PRIVATE = 0o700
log = logging.getLogger(__name__)


def cache_folder(sources: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for the machine code of the kernels in the folder `sources`.

    It lies beside the sources, or in the folder that `TIDESERVE_KERNEL_CACHE` names. The latter
    starts as a copy of the former, because an image contains compiled kernels but is read-only. The
    code is for the CPUs that compiled it; another CPU ignores it and adds its own.

    The code is executed. So a folder that other users may have written to is not used: the function
    warns, and returns the folder beside the sources.

    A kernel contains the functions that it calls from other files, and numba does not notice when
    these change. So every state of the sources has a folder of its own.
    """
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*.py")):
        digest.update(path.read_bytes())
    own = sources / "__pycache__" / f"kernels-{digest.hexdigest()[:16]}"
    chosen = environment.get(CACHE_VARIABLE)
    if not chosen:
        return own
    folder = Path(chosen).expanduser().absolute() / own.name
    begin_with(own, folder)
    for one in (folder.parent, folder):
        reason = why_not_trusted(one)
        if reason is not None:
            log.warning(
                "the cache of kernels at %s is not used: %s; give %s a folder of this user that"
                " nobody else may write to",
                *(one, reason, CACHE_VARIABLE),
            )
            return own
    return folder


def why_not_trusted(folder: Path) -> str | None:
    """Which other user may have written to the folder; None if none, or if there is no folder."""
    try:
        seen = folder.stat()
    except OSError:
        return None
    if seen.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {seen.st_uid}"
    if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"its mode {stat.S_IMODE(seen.st_mode):o} lets others write"
    return None


def begin_with(seed: Path, folder: Path) -> None:
    """Make `folder` with what is in `seed`, if anything, for this user alone, unless it exists.

    Other processes see all of it or nothing.
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
        # Another process was first, or the folder may not be written to: kernels are then compiled.
        if not os.path.isdir(folder):  # Path.is_dir raises where it may not look.
            log.info("the cache of kernels begins empty: %s", error)


CACHE_LINE_BYTES = 64
WIDE_FLOATS = 16
"""How many float32 a vector of 512 bits holds."""


def stored_array(stored: torch.Tensor) -> np.ndarray:
    """The memory of a tensor of one of `STORED_TYPES` as an array of float32 or uint16."""
    array: np.ndarray = (
        stored if stored.dtype == torch.float32 else stored.view(torch.uint16)
    ).numpy()
    return array


def wide_vectors(features: str) -> str:
    """The `features` of a CPU, with vectors of 512 bits enabled if it has them.

    By default LLVM uses half of such a vector, to keep the clock rate of other code high.
    """
    has_wide = "+avx512f" in features.split(",")
    return f"{features},-prefer-256-bit" if has_wide else features


def vector_floats(features: str) -> int:
    """How many float32 the widest vector of a CPU with `features` holds; at least eight."""
    return WIDE_FLOATS if "+avx512f" in features.split(",") else WIDE_FLOATS // 2


numba.config.CACHE_DIR = str(cache_folder(Path(__file__).parent))
if numba.config.CPU_FEATURES is None:  # Unless the environment sets it.
    numba.config.CPU_FEATURES = wide_vectors(get_host_cpu_features())
VECTOR_FLOATS = vector_floats(numba.config.CPU_FEATURES)
"""How many float32 a kernel computes with at once."""


def processor_features() -> set[str]:
    """What kernels may use, as +name, and what not, as -name; `NUMBA_CPU_FEATURES` can say less."""
    return set(numba.config.CPU_FEATURES.split(","))


def assembly(module: str) -> list[str]:
    """The lines that LLVM writes for a `module` in its language, as kernels are compiled."""
    initialize_llvm()
    name, features = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name() if name is None else name, features=features, opt=2
    )
    return str(machine.emit_assembly(binding.parse_assembly(module))).splitlines()


def compiled(signature: str) -> Callable[[Callable[..., Any]], Kernel]:
    """A function as a kernel for `signature`, in which `STORED` stands for the dtypes of weights.

    Sums may be reordered, so that they can use vectors; the order is the same in every call. A
    division by zero is not looked for, which would keep a loop from using vectors. A kernel
    releases the interpreter lock.
    """
    return lambda function: Kernel(function, signature)


@intrinsic
def float32_of(typing_context: Any, number: Any) -> tuple[Any, Callable[..., Any]]:
    """A float32 unchanged; a bfloat16, given as uint16, as float32."""

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
    """A float32 as `array` stores it: unchanged, or as the bits of the nearest bfloat16.

    Of two as near it is the even one.
    """
    stored = array.dtype

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        number = arguments[0]
        if stored == types.float32:
            return number
        word = ir.IntType(32)
        bits = builder.bitcast(number, word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.add(builder.add(bits, word(0x7FFF)), odd)
        broken = builder.fcmp_unordered("uno", number, number)
        chosen = builder.select(broken, word(0x7FC0 << 16), rounded)
        return builder.trunc(builder.lshr(chosen, word(16)), ir.IntType(16))

    return stored(types.float32, array), generate


@intrinsic
def larger(typing_context: Any, first: Any, second: Any) -> tuple[Any, Callable[..., Any]]:
    """The larger of two float32 that are numbers, so that the CPU can compare many at once."""

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
    """Prefetch the cache line at `offset_bytes` from the start of `array[index]`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        stride = builder.extract_value(made.strides, 0)
        begin = builder.mul(stride, arguments[1])
        fetch(builder, cgutils.pointer_add(builder, made.data, builder.add(begin, arguments[2])))
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


def fetch(builder: Any, address: Any) -> None:
    """Emit a prefetch of a cache line into the first cache; any address is safe."""
    word, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
    )
    to_read, first_cache, data = word(0), word(3), word(1)
    builder.call(function, [builder.bitcast(address, pointer), to_read, first_cache, data])
