"""Virtual environments for wheels built by a test."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

TIMEOUT_S = 240
IMPORTS = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.import_module(name).__file__
    except ImportError as error:
        found[name] = None
print(json.dumps(found))
"""


class Environment:
    """A fresh virtual environment with this environment's packages, but without this tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run(sys.executable, "-m", "venv", "--without-pip", str(folder))
        self.bin = folder / "bin"
        variables = {"base": str(folder), "platbase": str(folder)}
        self.packages = Path(sysconfig.get_path("purelib", vars=variables))
        # Python searches folders listed in a .pth file without reading .pth files in them, so our
        # editable installation stays hidden.
        (self.packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def install(self, wheel: Path) -> None:
        command = (sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install")
        self._run(*command, "--quiet", "--no-deps", "--no-index", str(wheel))

    def imports(self, *names: str) -> dict[str, str | None]:
        """The file of each module; None for modules that cannot be imported."""
        files: dict[str, str | None] = json.loads(
            self._run(str(self.bin / "python"), "-c", IMPORTS, *names)
        )
        return files

    def command(self, *command: str) -> str:
        return self._run(str(self.bin / command[0]), *command[1:])

    def _run(self, *command: str) -> str:
        kept = {key: text for key, text in os.environ.items() if not key.startswith("PYTHON")}
        done = subprocess.run(
            command,
            cwd=self.folder.parent,
            env=kept,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
