"""The figures of a step, written after each part, so that an interrupted step keeps its parts."""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Figures:
    """A JSON object in a file, which is replaced whenever a part is added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, Any] = {}
        self.failed = False

    def add(self, name: str, value: Any) -> None:
        """Add a part and write the file."""
        self.values[name] = value
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps(self.values, indent=1))
        temporary.replace(self._path)

    def measure(self, name: str, act: Callable[[], Any]) -> None:
        """Add the result of `act`, and its duration as `NAME_took_s`.

        An exception is printed, and its text becomes `NAME_failed`; later parts still run.
        """
        began_s = time.monotonic()
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            self.add(name, act())
        except Exception as error:  # noqa: BLE001 - the next part may work
            traceback.print_exc()
            self.failed = True
            self.add(f"{name}_failed", f"{type(error).__name__}: {error}"[:600])
        self.add(f"{name}_took_s", round(time.monotonic() - began_s, 2))

    def end(self) -> None:
        """End this process at once; a destructor of a broken GPU context could hang it."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if self.failed else 0)


def step_parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments that all steps take."""
    parser = argparse.ArgumentParser(description=(documentation or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="output file of the figures")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on CPUs, no driver")
    parser.add_argument("--device", default="cuda:0")
    return parser
