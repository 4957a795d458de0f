"""Files around the code are consistent: workflows, ``.ci/run``, classifiers, tox, names and lists of tests, English."""

import re
import subprocess
import tomllib

import yaml

import idempotency
from tests.docs.pages import ROOT, text_of
from tests.plugin import marks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CI_RUN = ROOT / ".ci/run"
TOX = (ROOT / "tox.ini").read_text()


def workflow(name):
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())


def parts_of(script):
    """The parts listed in the header of ``.ci/run``: the parts of a full run, then the long ones."""
    return re.findall(r"^#   (\w+) {2,}", script.read_text(), re.MULTILINE)


def test_the_workflows_run_every_part_of_ci_run():
    jobs = workflow("ci")["jobs"]
    of_ci = jobs["part"]["strategy"]["matrix"]["part"]
    last = jobs["part"]["steps"][-1]
    assert (last["run"], last["env"]["PART"]) == ('.ci/run "$PART"', "${{ matrix.part }}")
    weekly = [job["steps"][-1]["run"] for job in workflow("matrix")["jobs"].values()]
    assert parts_of(CI_RUN) == of_ci + [command.removeprefix(".ci/run ") for command in weekly]


def test_ci_run_refuses_an_unknown_part():
    refused = subprocess.run(["bash", CI_RUN, "parts"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "no part named parts" in refused.stderr


def test_the_matrix_matches_the_classifiers():
    classifiers = PROJECT["project"]["classifiers"]
    pythons = [found[1] for line in classifiers if (found := re.fullmatch(r".* :: Python :: (3\.\d+)", line))]
    assert workflow("matrix")["jobs"]["matrix"]["strategy"]["matrix"]["python"] == pythons
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
    djangos = [found[1] for line in classifiers if (found := re.fullmatch(r"Framework :: Django :: ([\d.]+)", line))]
    assert re.findall(r"^    dj\d+: Django>=([\d.]+),", TOX, re.MULTILINE) == djangos
    readme = text_of("README.md")
    assert f"Django {djangos[0]} to {djangos[-1]} on Python {pythons[0]} to {pythons[-1]}" in readme


def test_the_version_has_one_source():
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "idempotency/__init__.py"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(idempotency.__version__)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE)


def test_the_configurations_are_valid():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert all(hook["language"] == "system" for hook in hooks)
    documentation = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    assert (ROOT / documentation["sphinx"]["configuration"]).exists()
    (command,) = re.findall(r"--group \w+", str(documentation["build"]["jobs"]["install"]))
    assert command.split()[1] in PROJECT["dependency-groups"]


def test_the_reading_order_names_files_and_functions_that_exist():
    _, _, text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Read the code in this order")
    names = re.findall(r"`([^`]+)`", text.partition("\n## ")[0])
    files = [ROOT / name for name in names if name.startswith("idempotency/")]
    code = "\n".join(file.read_text() for file in files)
    functions = [name.rpartition(".")[2] for name in names if re.fullmatch(r"[\w.]+", name) and "/" not in name]
    assert len(files) >= 6
    assert len(functions) >= 10
    assert [name for name in functions if f"def {name}(" not in code and not name.endswith("py")] == []


def test_the_page_about_a_request_names_classes_and_methods_that_exist():
    names = re.findall(r"`([A-Z][a-z]+[A-Za-z]*)(?:\.(\w+))?`", text_of("explanation/request.md"))
    code = "\n".join(path.read_text() for path in (ROOT / "idempotency").rglob("*.py"))
    assert len({name for name, _ in names}) >= 3
    assert [name for name, _ in names if not re.search(rf"^class {name}\b", code, re.MULTILINE)] == []
    assert [method for _, method in names if method and f"    def {method}(" not in code] == []


# The lists of tests: FAILURES.md and README.md


def test_each_failure_has_a_test_or_a_reason_and_each_mark_has_an_entry():
    """The marks are read from the sources of all tests, because a run may collect only some tests."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    used = {name for text in texts for name in re.findall(r"mark\.((?:scenario|failure)_\w+)", text)}
    assert {name for name, text in marks().items() if "*No test: " not in text} == used
    assert all(text.endswith((".*", ".")) for text in marks().values())
    for kind in ("scenario", "failure"):
        numbers = [int(name.partition("_")[2]) for name in marks() if name.startswith(kind)]
        assert numbers == sorted(set(numbers)) != []


def test_the_readme_lists_tests_for_each_module_and_only_existing_files():
    package, readme = ROOT / "idempotency", (ROOT / "tests/README.md").read_text()
    rows = re.findall(r"^\| (`.+?) \| (`.+?) \| \d+ \|$", readme, re.MULTILINE)
    named = [package / name for modules, _ in rows for name in re.findall(r"`([^`]+)`", modules)]
    tests = [re.findall(r"tests/[\w/.]+", names) for _, names in rows]
    assert all(tests)
    assert [path for path in (*named, *(ROOT / name for row in tests for name in row)) if not path.exists()] == []
    modules = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    assert [path for path in modules if not any(path.is_relative_to(place) for place in named)] == []


def test_the_readme_names_each_file_of_tests():
    named = [ROOT / name for name in re.findall(r"tests/[\w/.]+", (ROOT / "tests/README.md").read_text())]
    files = {*(ROOT / "tests").rglob("test_*.py")}
    assert {file for file in files if not any(file.is_relative_to(path) for path in named)} == set()


def test_the_picture_of_the_rooms_follows_the_layers():
    layers = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    picture = (ROOT / "CONTRIBUTING.md").read_text().partition("## How the rooms lie")[2].partition("\n## ")[0]
    lines = re.findall(r"^\d+\. (.*(?:\n    .*)*)", picture, re.MULTILINE)
    line_of = {name: number for number, line in enumerate(lines) for name in re.findall(r"`(\w+)(?:\.py|/)`", line)}
    in_order = [name for layer in layers for name in layer.split(" : ")]
    assert set(in_order) == set(line_of)
    assert [line_of[name] for name in in_order] == sorted(line_of.values())
