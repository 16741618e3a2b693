"""The tools that check deploy/, fetched into the cache folder without installing them.

kustomize and Go with Helm's libraries come as Debian packages, the schemas of Kubernetes by pip.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from deploy_objects import ROOT, ToolMissing, run_tool, tools_folder

FETCH_TIMEOUT_S = 1200
GO_TIMEOUT_S = 300
NEXT_RELEASE = "trixie"
RENDERER = ROOT / "scripts" / "helm_render" / "main.go"
SCHEMAS = ROOT / "requirements" / "deploy.txt"
GO_RELEASE = "1.19"
# Go's compiler and all dependencies of the renderer: dpkg resolves no dependencies.
PACKAGES = (
    f"kustomize/{NEXT_RELEASE}",
    f"golang-{GO_RELEASE}-go",
    f"golang-{GO_RELEASE}-src",
    "golang-github-google-uuid-dev",
    "golang-github-huandu-xstrings-dev",
    "golang-github-imdario-mergo-dev",
    "golang-github-masterminds-goutils-dev",
    "golang-github-masterminds-semver-dev",
    "golang-github-masterminds-sprig-dev",
    "golang-github-mitchellh-copystructure-dev",
    "golang-github-mitchellh-reflectwalk-dev",
    "golang-github-shopspring-decimal-dev",
    "golang-github-spf13-cast-dev",
    "golang-golang-x-crypto-dev",
    "golang-gopkg-yaml.v2-dev",
    "golang-gopkg-yaml.v3-dev",
    "golang-k8s-sigs-yaml-dev",
)


def fetch() -> list[str]:
    """Fetch missing tools; returns a sentence per failure."""
    folder = tools_folder()
    folder.mkdir(parents=True, exist_ok=True)
    debian = [str(ROOT / "scripts" / "debian_tools.sh"), str(folder / "debian"), *PACKAGES]
    commands = {"the Debian packages": debian}
    stamp = folder / "python" / "requirements.txt"
    if not stamp.is_file() or stamp.read_bytes() != SCHEMAS.read_bytes():
        # pip would not remove files of earlier versions from a target folder.
        shutil.rmtree(stamp.parent, ignore_errors=True)
        target = ["--no-deps", "--no-compile", "--target", str(stamp.parent), "-r", str(SCHEMAS)]
        commands["the schemas of Kubernetes"] = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            *target,
        ]
    missing = []
    for tool, command in commands.items():
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=FETCH_TIMEOUT_S
        )
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no error output"])[-1]
            missing.append(f"{tool} cannot be fetched: {reason}")
        elif "pip" in command:
            # Write the stamp only after success, so that an interrupted fetch is repeated.
            stamp.write_bytes(SCHEMAS.read_bytes())
    return missing


def renderer() -> Path:
    """The program that renders charts, built if missing.

    Raises:
        ToolMissing: without Go and Helm's libraries.
        ValueError: with the output of the compiler, if it fails.
    """
    folder = tools_folder()
    go_root = folder / "debian" / "usr" / "lib" / f"go-{GO_RELEASE}"
    program = folder / "helm_render"
    if program.is_file() and program.stat().st_mtime > RENDERER.stat().st_mtime:
        return program
    if not (go_root / "bin" / "go").is_file():
        raise ToolMissing(
            "the chart's renderer needs Go and Helm's libraries; `make check-deploy` fetches them"
            " on Debian"
        )
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": str(folder),
        "GOROOT": str(go_root),
        "GOPATH": str(folder / "debian" / "usr" / "share" / "gocode"),
        "GOCACHE": str(folder / "go-cache"),
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
    }
    command = [str(go_root / "bin" / "go"), "build", "-o", str(program), str(RENDERER)]
    run_tool(command, f"{RENDERER.name} cannot be built", GO_TIMEOUT_S, environment)
    # Mark the program as newer than its source, for the check above.
    os.utime(program)
    return program


def kubernetes_schemas() -> None:
    """Make the package of Kubernetes' schemas importable. Raises ToolMissing."""
    folder = tools_folder() / "python"
    if not (folder / "kubernetes_validate").is_dir():
        raise ToolMissing(
            "the schemas of Kubernetes are not in the cache; `make check-deploy` fetches them"
        )
    sys.path.append(str(folder))
