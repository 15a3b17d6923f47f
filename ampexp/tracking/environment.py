"""What a run ran on: commit, versions, processor, GPU."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

# /proc/cpuinfo's words: x86, then Arm
LOW_PRECISION_FLAGS = (
    *("f16c", "avx512_fp16", "avx512_bf16", "amx_tile", "amx_bf16", "amx_fp16"),
    *("fphp", "asimdhp", "bf16"),
)
PACKAGES = {"torch": "torch", "mlflow": "mlflow", "hydra": "hydra-core", "ampexp": "ampexp"}


def describe_environment(directory: Path | None = None) -> dict[str, str]:
    """Describe commit, versions and processors as words for tags.

    `git_commit` and `git_dirty` are there if `directory` (the current one, if None) is in a git
    work tree; dirty means that tracked files differ from the commit. `cpu_low_precision` lists the
    processor's own half-precision instructions, or is `none`.
    """
    return {**_git(directory or Path.cwd()), **_versions(), **_cpu(), **_gpu()}


def installed_packages() -> str:
    """List all installed packages as `name==version` lines, sorted."""
    found = {f"{dist.name}=={dist.version}" for dist in metadata.distributions()}
    return "".join(f"{line}\n" for line in sorted(found, key=str.casefold))


def _git(directory: Path) -> dict[str, str]:
    def ask(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(directory), *words],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    try:
        commit = ask("rev-parse", "HEAD")
        changed = ask("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):  # no git, no repository, no commit yet
        return {}
    return {"git_commit": commit, "git_dirty": str(bool(changed)).lower()}


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python_version": platform.python_version()}
    for name, package in PACKAGES.items():
        try:
            versions[f"{name}_version"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[f"{name}_version"] = "not installed"
    return versions


@functools.cache
def _cpu() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (s.partition(":") for s in lines)}
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    low = [flag for flag in LOW_PRECISION_FLAGS if flag in flags]
    return {
        "platform": f"{sys.platform} {platform.machine()}",
        "cpu_model": facts.get("model name") or platform.processor() or platform.machine(),
        # without the list of flags nothing is known, which is not the same as none
        "cpu_low_precision": (" ".join(low) or "none") if flags else "unknown",
    }


@functools.cache
def _gpu() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {}
    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu_model": torch.cuda.get_device_name(),
        "gpu_capability": f"{major}.{minor}",
        "gpu_count": str(torch.cuda.device_count()),
    }
