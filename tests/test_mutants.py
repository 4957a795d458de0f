"""The list of mutants fits the code, and the tool distinguishes killed mutants from survivors."""

from dataclasses import replace

import pytest

from tools import mutants
from tools.mutants import LIST, ROOT, Mutant, WrongListError, read_list, wrong_entries

SOUND = Mutant("sound", "code.py", "1", "2", "It is wrong.", ("test_code.py::test_one",))


@pytest.fixture
def tree(tmp_path):
    """A module, and the file of its test."""
    (tmp_path / "code.py").write_text("def one():\n    return 1\n\n\ndef none():\n    return None\n")
    (tmp_path / "test_code.py").write_text("def test_one(): ...\n")
    return tmp_path


def test_each_mutant_of_the_list_can_be_applied_and_names_tests_that_exist():
    assert wrong_entries(read_list(LIST.read_text()), ROOT) == []


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (replace(SOUND, old="3"), "sound: its text is 0 times in code.py"),
        (replace(SOUND, old="return"), "sound: its text is 2 times in code.py"),
        (replace(SOUND, file="gone.py"), "sound: its text is 0 times in gone.py"),
        (replace(SOUND, new="("), "sound: '(' was never closed (<unknown>, line 2)"),
        (replace(SOUND, new="1"), "sound: it changes nothing"),
        (replace(SOUND, tests=()), "sound: it names no test"),
        (replace(SOUND, tests=("test_code.py::test_two",)), "sound: there is no test test_code.py::test_two"),
        (replace(SOUND, tests=("test_gone.py",)), "sound: there is no test test_gone.py"),
        (replace(SOUND, database="oracle"), "sound: it names the database 'oracle'"),
    ],
)
def test_an_entry_that_proves_nothing_is_refused(tree, entry, problem):
    assert (wrong_entries([], tree), wrong_entries([SOUND], tree)) == (["0 mutants were checked"], [])
    assert wrong_entries([entry], tree) == [problem]


def let_tests_end(monkeypatch, codes):
    """Replace pytest: each test ends with its code. Returns the contents of the module during each run."""
    seen = []

    def run_tests(copy, tests, database):
        seen.append((copy / "code.py").read_text())
        return mutants.subprocess.CompletedProcess([], codes[tests[0]], "", "")

    monkeypatch.setattr(mutants, "run_tests", run_tests)
    return seen


@pytest.mark.parametrize(
    ("code", "killed"), [(mutants.PASSED, False), (mutants.FAILED, True), (2, None), (4, None), (5, None)]
)
def test_only_failing_tests_kill(tree, monkeypatch, code, killed):
    """Tests that can't be collected or don't exist detect nothing. The tree is restored afterwards."""
    seen = let_tests_end(monkeypatch, {SOUND.tests[0]: code})
    before = (tree / "code.py").read_text()
    if killed is None:
        with pytest.raises(WrongListError, match=f"pytest ended with {code}"):
            mutants.is_killed(SOUND, tree)
    else:
        assert mutants.is_killed(SOUND, tree) is killed
    assert seen == [before.replace("1", "2")]
    assert (tree / "code.py").read_text() == before


def test_the_exit_code_reports_survivors_and_mutants_that_could_not_run(tree, monkeypatch, capsys):
    """A mutant that can't run does not stop the others."""
    codes = {"killed": mutants.FAILED, "survives": mutants.PASSED, "unknown": 5}
    entries = [replace(SOUND, name=name, tests=(name,)) for name in codes]
    monkeypatch.setattr(mutants, "ROOT", tree)
    monkeypatch.setattr(mutants, "try_soundness", lambda *arguments: None)
    let_tests_end(monkeypatch, codes)
    killed, survives, unknown = entries
    assert [mutants.try_all(chosen, 1) for chosen in ([killed], [killed, survives], [unknown, killed])] == [0, 1, 2]
    printed = capsys.readouterr().out
    assert "2 mutants, 1 killed, 1 survived\n  survives in code.py: It is wrong." in printed
    assert "unknown: pytest ended with 5" in printed
