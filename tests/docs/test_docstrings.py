"""Docstrings name modules, files, errors, parameters and results that exist."""

import ast
import builtins
import pkgutil
import re
from pathlib import Path

import django.core.exceptions
import django.db

import idempotency

PACKAGE = Path(idempotency.__file__).parent
ROOT = PACKAGE.parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: A file in projects.
OF_PROJECTS = {"operations.py"}


def documented(name):
    """The docstrings of a module, each with its node."""
    nodes = [node for node in ast.walk(TREES[name]) if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))]
    return [(node, text) for node in nodes if (text := ast.get_docstring(node))]


def bound(tree):
    """The names that a module binds by an import, a definition or an assignment."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            names.add(node.name)
    return names


NODES = [node for tree in TREES.values() for node in ast.walk(tree)]
BOUND = {SOURCES[name]: bound(tree) for name, tree in TREES.items()}
CLASSES = {node.name for node in NODES if isinstance(node, ast.ClassDef)}
LITERALS = {node.value for node in NODES if isinstance(node, ast.Constant)}
ERRORS = {*vars(builtins), *vars(django.core.exceptions), *vars(django.db), *CLASSES}


def modules_of(folder):
    return {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}


def is_there(folder, dotted):
    """Whether a dotted name resolves to a module of a package, or to a name in such a module."""
    first, _, rest = dotted.partition(".")
    if rest and (folder / first / "__init__.py").exists():
        return is_there(folder / first, rest)
    if not rest:
        return first in modules_of(folder) | BOUND.get(folder / "__init__.py", set())
    return rest.partition(".")[0] in BOUND.get(folder / f"{first}.py", ())


def exists(dotted):
    try:
        return pkgutil.resolve_name(dotted) is not None
    except (AttributeError, ImportError):
        return False


def missing(find):
    """The findings of ``find``, by module."""
    return {name: found for name in TREES if (found := find(name))}


def named(name, pattern):
    return {found for _, text in documented(name) for found in re.findall(pattern, text)}


def test_the_docstring_of_a_package_names_its_modules():
    def absent(name):
        folder = SOURCES[name].parent
        if not name.endswith("__init__.py"):
            return set()
        words = re.findall(r"``([a-z_]+)``", ast.get_docstring(TREES[name]) or "")
        below = set().union(*(names for path, names in BOUND.items() if folder in path.parents))
        return {*words} - below - modules_of(folder) - modules_of(PACKAGE)

    assert missing(absent) == {}


def resolves(path, dotted):
    app, _, rest = dotted.partition(".")
    if app.startswith("idempotency") and LITERALS & {dotted, rest}:  # a check, a logger, a permission
        return True
    if app == "idempotency":
        return is_there(PACKAGE, rest)
    return app in BOUND[path] or any(is_there(place, dotted) for place in (PACKAGE, path.parent)) or exists(dotted)


def test_a_dotted_name_in_a_docstring_resolves():
    def absent(name):
        dotted = named(name, r"``\"?((?!request\.)[a-z_]\w*(?:\.(?!(?:py|toml|md)`)\w+)+)\"?``")
        return {one for one in dotted if not resolves(SOURCES[name], one)}

    assert missing(absent) == {}


def test_a_file_that_a_docstring_names_exists():
    def absent(name):
        places = (SOURCES[name].parent, PACKAGE, ROOT)
        files = named(name, r"``([a-z][\w/]*(?:\.(?:py|toml|md)|/))``") - OF_PROJECTS
        return {file for file in files if not any((place / file).exists() for place in places)}

    assert missing(absent) == {}


def test_an_error_that_a_docstring_names_exists():
    def absent(name):
        errors = named(name, r":raises ([\w.]+):")
        known = ERRORS | BOUND[SOURCES[name]]
        return {error for error in errors if error.partition(".")[0] not in known and not exists(error)}

    assert missing(absent) == {}


def parameters(node):
    if isinstance(node, ast.Module):
        return set()
    if isinstance(node, ast.ClassDef):
        own = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
        made = [each for each in node.body if isinstance(each, FUNCTIONS) and each.name == "__init__"]
        return own.union(*map(parameters, made))
    given = node.args
    some = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {each.arg for each in some if each is not None}


def test_a_parameter_that_a_docstring_names_exists():
    def absent(name):
        pairs = [(node, {*re.findall(r":param (\w+):", text)}) for node, text in documented(name)]
        return {parameter for node, described in pairs for parameter in described - parameters(node)}

    assert missing(absent) == {}


def test_a_result_that_a_docstring_describes_is_returned():
    def absent(name):
        described = [node for node, text in documented(name) if ":returns:" in text]
        return {node.name for node in described if node.returns and ast.unparse(node.returns) in ("None", "Never")}

    assert missing(absent) == {}
