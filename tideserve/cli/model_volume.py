"""Put a model where containers find it: `python -m tideserve.cli.model_volume`, which then ends.

`MODEL` in the environment is a hub id (organisation/name), or empty for the default model; it comes
to lie in the folder of that name in `MODELS`. Files that lie there already are not asked for again.
"""

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


def place_model(model: str, models: Path, report: Report) -> Path:
    """The folder of `model` in `models`, with everything in it. Raises ModelUnavailable."""
    name = model or DEFAULT_MODEL_NAME
    folder = models / name
    try:
        if name == DEFAULT_MODEL_NAME:
            place_default_model(folder, report)
        elif not HUB_ID.fullmatch(name):
            raise ModelUnavailable(
                f"MODEL is '{model}', but must be a hub id (organisation/name); leave it out to get"
                f" {DEFAULT_MODEL_NAME}."
            )
        elif not folder.is_dir():
            _download_into(folder, name, models / UNFINISHED / name, report)
    except OSError as error:
        raise ModelUnavailable(
            f"The model cannot be written to {models} ({error.strerror or error})."
            " Give that volume more room, or to the user who runs this."
        ) from error
    check_model_folder(folder)
    return folder


def _download_into(folder: Path, hub_id: str, unfinished: Path, report: Report) -> None:
    """A download that was cut short is gone on with the next time."""
    unfinished.mkdir(parents=True, exist_ok=True)
    download(hub_id, report, folder=unfinished)
    check_model_folder(unfinished)
    shutil.rmtree(unfinished / ".cache", ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished.rename(folder)


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Place the model with progress lines; 1 and a sentence when that fails."""
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
