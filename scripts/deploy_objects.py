"""Kubernetes objects from `kustomize build`, and the variants that the chart renders.

The tools are taken from PATH, else from the cache folder, into which `make check-deploy` fetches
them.
"""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tideserve.cli.cache import cache_root

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
CPU_OVERLAY = DEPLOY / "overlays" / "cpu"
KUSTOMIZE_TIMEOUT_S = 60

Object = dict[str, Any]


class ToolMissing(Exception):
    """A tool is neither installed nor in the cache; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A set of manifests: an overlay and components, or values of the chart."""

    device: str = "cpu"
    etcd: bool = True
    features: frozenset[str] = frozenset()

    def has(self, feature: str) -> bool:
        """Whether the variant includes the component `feature`."""
        return self.etcd if feature == "etcd" else feature in self.features

    @property
    def name(self) -> str:
        """For people."""
        return "+".join([self.device, *(() if self.etcd else ("no-etcd",)), *sorted(self.features)])


CPU = Variant()
FEATURES = (
    *("monitoring", "keda", "tls", "cert-manager", "etcd-credentials", "api-keys", "batches"),
    *("upstream", "http-route", "inference-pool"),
)
VARIANTS = (
    CPU,
    Variant(device="gpu"),
    Variant(etcd=False),
    *(Variant(features=frozenset({name})) for name in FEATURES),
    Variant(etcd=False, features=frozenset({"tls"})),
)
"""The variants that a single values file of the chart renders."""


def tools_folder() -> Path:
    """Folder of fetched tools."""
    return cache_root() / "deploy-tools"


def kustomize_command() -> list[str]:
    """The command that builds a kustomization. Raises ToolMissing."""
    for tool in (
        shutil.which("kustomize"),
        tools_folder() / "debian" / "usr" / "bin" / "kustomize",
    ):
        if tool is not None and os.access(tool, os.X_OK):
            return [str(tool), "build"]
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    raise ToolMissing(
        "kustomize is neither on PATH nor in the cache; `make check-deploy` fetches it on Debian"
    )


def build(folder: Path) -> list[Object]:
    """The objects of the kustomization in `folder`.

    Raises:
        ToolMissing: without kustomize.
        ValueError: with the output of kustomize, if it fails.
    """
    command = [*kustomize_command(), str(folder)]
    return parsed(run_tool(command, f"kustomize rejects {folder}", KUSTOMIZE_TIMEOUT_S))


def parsed(text: str) -> list[Object]:
    """The objects in the documents of a YAML text."""
    return [document for document in yaml.safe_load_all(text) if document is not None]


def run_tool(
    command: Sequence[str],
    refusal: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a tool; returns its output. Raises ValueError with `refusal` and the error output."""
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    if done.returncode != 0:
        raise ValueError(f"{refusal}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def build_variant(variant: Variant) -> list[Object]:
    """The cached objects of `variant`; do not modify. Raises like `build`."""
    overlay = f"overlays/{variant.device}" if variant.etcd else "base"
    if not variant.etcd and variant.device != "cpu":
        raise ValueError(f"there is no kustomization for variant {variant.name}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()

        def relative(path: str) -> str:
            return os.path.relpath(DEPLOY / path, folder)

        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [relative(overlay)],
            "components": [relative(f"components/{name}") for name in sorted(variant.features)],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return build(folder)


def identity(obj: Object) -> str:
    """Kind/name, which is unique in a set, since there is a single namespace."""
    return f"{obj['kind']}/{obj['metadata']['name']}"
