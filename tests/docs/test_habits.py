"""The files around the code agree: workflows with ``.ci/run``, classifiers with tox, and hooks with both."""

from __future__ import annotations

import re
import sys
from typing import Any

import yaml

import idempotency
from tests.docs.pages import ROOT, text_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CI_RUN = (ROOT / ".ci/run").read_text()
TOX = (ROOT / "tox.ini").read_text()


def workflow(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    return loaded


def commands(name: str) -> str:
    steps = [step for job in workflow(name)["jobs"].values() for step in job["steps"]]
    return "\n".join(step["run"] for step in steps if "run" in step)


def test_the_workflow_runs_what_ci_run_does() -> None:
    ran = commands("ci")
    for readme_command in re.findall(r"readme_command '([^']+)'", CI_RUN):
        assert readme_command in ran
        assert readme_command in text_of("README.md")
    for command in re.findall(r"^(?:\.venv/bin/tox -e|tests/).*$", CI_RUN, re.MULTILINE):
        assert command in ran
    (quick,) = re.findall(r"quick=\((.+)\)", CI_RUN)
    assert quick in ran
    (operations,) = re.findall(r"--operations \d+", CI_RUN)
    assert operations in ran


def test_the_workflow_runs_the_pairs_of_tox() -> None:
    (pairs,) = re.findall(r"^ +pairs = (.+)$", TOX, re.MULTILINE)
    included = workflow("ci")["jobs"]["pairs"]["strategy"]["matrix"]["include"]
    assert [pair["environment"] for pair in included] == pairs.split(", ")
    for pair in included:
        assert pair["environment"].startswith(f"py{pair['python'].replace('.', '')}-")


def test_the_matrix_is_what_the_classifiers_say() -> None:
    classifiers = PROJECT["project"]["classifiers"]
    pythons = [found[1] for line in classifiers if (found := re.fullmatch(r".* :: Python :: (3\.\d+)", line))]
    assert workflow("matrix")["jobs"]["matrix"]["strategy"]["matrix"]["python"] == pythons
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
    djangos = [found[1] for line in classifiers if (found := re.fullmatch(r"Framework :: Django :: ([\d.]+)", line))]
    assert re.findall(r"^    dj\d+: Django>=([\d.]+),", TOX, re.MULTILINE) == djangos
    readme = text_of("README.md")
    assert f"Django {djangos[0]} to {djangos[-1]} on Python {pythons[0]} to {pythons[-1]}" in readme


def test_the_version_has_one_source() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "idempotency/__init__.py"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = f"## [{idempotency.__version__}]" in changelog
    assert released or f"This will be {idempotency.__version__}" in changelog


def test_the_configurations_are_read() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert all(hook["language"] == "system" for hook in hooks)
    documentation = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    assert (ROOT / documentation["sphinx"]["configuration"]).exists()
    (command,) = re.findall(r"--group \w+", str(documentation["build"]["jobs"]["install"]))
    assert command.split()[1] in PROJECT["dependency-groups"]
