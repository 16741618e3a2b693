"""A digest of the code that this worker runs: workers with the same one compute the same."""

import hashlib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

SERVICES = Path(__file__).resolve().parent.parent
PARTS = ("common", "core", "worker")
# Libraries that compute: another version may round differently.
LIBRARIES = ("numba", "torch", "transformers")


def code_digest(root: Path = SERVICES, parts: Iterable[str] = PARTS) -> str:
    """SHA-256 of the worker's sources below `root` and the versions of its libraries."""
    digest = hashlib.sha256()
    for part in sorted(parts):
        for path in sorted((root / part).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    for name in LIBRARIES:
        digest.update(f"{name} {_version(name)}\n".encode())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
