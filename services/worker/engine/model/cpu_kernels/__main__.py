"""Compiles kernels ahead: `python -m services.worker.engine.model.cpu_kernels [MODULE ...]`.

Fills the cache of machine code for all dtypes and the CPU that it runs on. MODULE is the name of a
module in this package; the default is all modules.
"""

import importlib
import pkgutil
import sys

from services.worker.engine.model import cpu_kernels
from services.worker.engine.model.cpu_kernels.kernel import Kernel


def main(modules: list[str]) -> None:
    """Load all kernels of `modules`."""
    every = [module.name for module in pkgutil.iter_modules(cpu_kernels.__path__)]
    for name in modules or [module for module in every if module != "__main__"]:
        module = importlib.import_module(f"{cpu_kernels.__name__}.{name}")
        for value in vars(module).values():
            if isinstance(value, Kernel):
                value.load(*cpu_kernels.STORED_TYPES)


if __name__ == "__main__":
    main(sys.argv[1:])
