"""A Secret as the kubelet mounts it: files are links through one link that is swapped."""

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

DATA = "..data"


class SecretVolume:
    """`folder` shows the files of the last `update` atomically.

    Each file is a link to `..data/<name>`, and `..data` is a link to a folder with the content.
    An update writes a new folder, renames a new link over `..data`, and deletes the former folder.
    """

    def __init__(self, folder: Path, files: Mapping[str, str], mode: int = 0o440) -> None:
        folder.mkdir()
        self._folder = folder
        self._mode = mode
        self._numbers = itertools.count()
        self.update(files)

    def update(self, files: Mapping[str, str]) -> None:
        """Replace all files atomically."""
        former = self._folder / DATA
        content = self._folder / f"..2026_11_23_14_00_00.{next(self._numbers)}"
        content.mkdir()
        for name, text in files.items():
            (content / name).write_text(text)
            (content / name).chmod(self._mode)
        gone = former.resolve() if former.is_symlink() else None
        link = self._folder / "..data_tmp"
        link.symlink_to(content.name)
        os.replace(link, former)
        for name in files:
            if not (self._folder / name).is_symlink():
                (self._folder / name).symlink_to(f"{DATA}/{name}")
        for path in self._folder.iterdir():
            if not path.name.startswith("..") and path.name not in files:
                path.unlink()
        if gone is not None:
            shutil.rmtree(gone)
