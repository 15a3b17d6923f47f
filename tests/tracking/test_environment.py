"""What a run ran on, as words."""

import subprocess
import sys

from ampexp.tracking.environment import describe_environment, installed_packages


def git(directory, *words):
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(directory), *who, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_versions_and_processor_are_words(tmp_path):
    words = describe_environment(tmp_path)
    assert words["python_version"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch_version", "mlflow_version", "hydra_version", "ampexp_version"} <= set(words)
    assert words["cpu_model"]
    assert words["cpu_low_precision"]
    assert "git_commit" not in words
    assert all(isinstance(word, str) for word in words.values())


def test_commit_and_changes_are_told(tmp_path):
    git(tmp_path, "init", "-q")
    assert "git_commit" not in describe_environment(tmp_path), "a repository without a commit"
    (tmp_path / "a.txt").write_text("1")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-q", "-m", "one")
    (tmp_path / "mlflow.db").write_text("not tracked")
    words = describe_environment(tmp_path)
    assert words["git_commit"] == git(tmp_path, "rev-parse", "HEAD")
    assert words["git_dirty"] == "false"
    (tmp_path / "a.txt").write_text("2")
    assert describe_environment(tmp_path)["git_dirty"] == "true"


def test_packages_are_listed_with_versions():
    lines = installed_packages().splitlines()
    assert any(line.startswith("mlflow==") for line in lines)
    assert lines == sorted(lines, key=str.casefold)
