"""Downloads a model into the volume that containers share: `python -m tideserve.cli.model_volume`.

The environment variable `MODEL` is a hub id (organisation/name or organisation/name@revision), or
empty for the default model.
The model is placed in the folder of that name in `MODELS`; files that exist are not downloaded
again.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tideserve.cli.model_folder import ModelUnavailable, check_model_folder
from tideserve.cli.model_store import (
    DEFAULT_MODEL_NAME,
    HUB_ID,
    Report,
    download,
    place_default_model,
)

UNFINISHED = ".unfinished"
PROFILES = ".profiles"
"""Folder of the volume in which workers store their measured profiles."""


def place_model(model: str, models: Path, report: Report) -> Path:
    """Download `model` into `models`; returns its folder. Raises ModelUnavailable."""
    name = model or DEFAULT_MODEL_NAME
    folder = models / name
    try:
        if name == DEFAULT_MODEL_NAME:
            place_default_model(folder, report)
        elif not HUB_ID.fullmatch(name):
            raise ModelUnavailable(
                f"MODEL is '{model}', but must be a hub id (organisation/name or"
                f" organisation/name@revision); leave MODEL empty for {DEFAULT_MODEL_NAME}."
            )
        elif not folder.is_dir():
            _download_into(folder, name, models / UNFINISHED / name, report)
    except OSError as error:
        raise ModelUnavailable(
            f"The model cannot be written to {models} ({error.strerror or error})."
            " Enlarge the volume, or make it writable for the user of this container."
        ) from error
    check_model_folder(folder)
    with contextlib.suppress(OSError):  # a volume without write access keeps no profiles
        (models / PROFILES).mkdir(exist_ok=True)
    return folder


def _download_into(folder: Path, hub_id: str, unfinished: Path, report: Report) -> None:
    """Download into `unfinished`, so that an interrupted download can resume, then rename."""
    unfinished.mkdir(parents=True, exist_ok=True)
    download(hub_id, report, folder=unfinished)
    check_model_folder(unfinished)
    shutil.rmtree(unfinished / ".cache", ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished.rename(folder)


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Place the model with progress lines; returns the exit status."""
    models = Path(environment.get("MODELS", "/models"))
    try:
        folder = place_model(
            environment.get("MODEL", ""), models, lambda line: print(line, flush=True)
        )
    except ModelUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    print(f"The model is in {folder}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
