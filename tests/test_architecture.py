"""Imports only point down: a layer may use the layers below it and itself, never those above."""

from __future__ import annotations

import ast
import collections
import functools
import gc
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import scaffpd
from forked import forked

ROOT = Path(scaffpd.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
MOST_FILES = 178
MOST_LINES = 46_150
BARE = r"(What|Who|Whose|Whom|Whether|How|As|Where|When|Why)\b"

# From the bottom up. A module may import from its own layer only within its own package.
LAYERS = [
    {"errors"},
    {"system"},
    {"federation", "objectives", "data"},
    {"figures", "models", "secure"},
    {"features", "privacy"},
    {"algorithms"},
    {"training"},
    {"study", "estimators", "convexify"},
    {"run"},
    {"deploy"},
    {"cli"},
]
FORBIDDEN = {
    ("algorithms", "cohort"),
    ("algorithms", "models"),
    ("cohort", "algorithms"),
    ("cohort", "steps"),
    ("deploy", "comparison"),
    ("deploy", "convexify"),
    ("runs", "deploy"),
}


def layer(part):
    return next(i for i, names in enumerate(LAYERS) if part in names)


@functools.cache
def parsed():
    """{file: its syntax tree} of the package; nothing of them is garbage, so none is searched for."""
    gc.disable()
    trees = {
        file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(ROOT.rglob("*.py"))
    }
    gc.enable()
    return trees


def statements(tree):
    """Every statement, however deep; expressions are not looked through, for they hold no classes and no imports."""
    left = list(tree.body)
    while left:
        statement = left.pop()
        for inner in ("body", "orelse", "handlers", "finalbody", "cases"):
            left += getattr(statement, inner, [])
        yield statement


def imports():
    """(importing part, imported part, file) for every import of our own modules."""
    for file, tree in parsed().items():
        relative = file.relative_to(ROOT)
        if relative in (
            Path("__init__.py"),
            Path("__main__.py"),
        ):  # they open the package and are in no layer
            continue
        part = relative.parts[0].removesuffix(".py")
        for node in statements(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
                if node.module == "scaffpd":
                    names = [f"scaffpd.{alias.name}" for alias in node.names]
            for name in names:
                pieces = name.split(".")
                if pieces[0] == "scaffpd" and len(pieces) > 1:
                    yield part, pieces[1], relative


def test_every_module_has_a_layer():
    parts = {
        p.name.removesuffix(".py") for p in ROOT.iterdir() if not p.name.startswith(("_", "."))
    }
    parts -= {"py.typed"}
    assert parts == set().union(*LAYERS) & parts
    assert set().union(*LAYERS) <= parts


def test_arrows_point_down():
    seen = 0
    for part, used, file in imports():
        seen += 1
        assert part == used or layer(used) < layer(part), (
            f"{file} imports scaffpd.{used}, which is not below it"
        )
        assert (part, used) not in FORBIDDEN, f"{file} must not know scaffpd.{used}"
    assert seen > 50


def test_importing_the_package_loads_nothing_heavy():
    heavy = {"torch", "scipy", "sklearn", "matplotlib", "rich", "typer", "pandas", "numpy"}
    code = f"import sys, scaffpd; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_core_needs_nothing_but_torch_numpy_and_scipy():
    """With every other dependency hidden, the quick start still runs."""
    code = (
        "import scaffpd as sp\n"
        "cohort = sp.Cohort(sp.data.synthetic(), sp.Linear('squared', l2=0.1))\n"
        "result = sp.train(sp.ScaffPD(sp.ChiSquare(rho=0.1)), cohort, rounds=500, tol=1e-8, progress=True)\n"
        "print(result.status)\n"
    )
    done = forked(
        code,
        "sklearn",
        "matplotlib",
        "rich",
        "typer",
        "pandas",
        "threadpoolctl",
        "cvxpy",
        "hypothesis",
    )
    assert done.stdout.strip() == "converged", done.stderr


def test_every_public_name_can_be_imported():
    for name in scaffpd.__all__:
        assert getattr(scaffpd, name) is not None
    assert set(scaffpd.__all__) <= set(dir(scaffpd))


def modules():
    """{module: its syntax tree} of the package."""
    paths = {file.relative_to(ROOT.parent).with_suffix(""): tree for file, tree in parsed().items()}
    return {".".join(path.parts).removesuffix(".__init__"): tree for path, tree in paths.items()}


def test_a_class_name_is_defined_once():
    homes = collections.defaultdict(list)
    for name, tree in modules().items():
        for node in statements(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_no_module_imports_itself_by_way_of_others():
    """No imports make a cycle, those inside functions and for type checkers included."""
    trees = modules()
    graph = collections.defaultdict(set)
    for name in trees.keys() - {"scaffpd", "scaffpd.__main__"}:  # they open the package
        for node in statements(trees[name]):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scaffpd"):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    graph[name].add(inner if inner in trees else node.module)
            elif isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names if alias.name in trees}
        graph[name].discard(name)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_the_package_stays_small_enough_to_hold_in_the_head():
    files = [file.read_text(encoding="utf-8").count("\n") for file in ROOT.rglob("*.py")]
    assert len(files) <= MOST_FILES
    assert sum(files) <= MOST_LINES  # a ratchet: lower it when the package shrinks


def docstrings():
    """(module, text) of every docstring in the package."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield name, " ".join(text.split())


def test_docstrings_begin_with_a_verb_or_a_noun():
    """See CONTRIBUTING, "How we write": "Return whether ..." and not "Whether ..."."""
    assert [f"{module}: {text[:80]}" for module, text in docstrings() if re.match(BARE, text)] == []


def test_no_sentence_that_contributing_rejects_is_in_the_package():
    page = (
        (PAGE.parents[1] / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .split("## How we write")[1]
    )
    rejected = [
        row.replace("\\|", "|") for row in re.findall(r"^\| (.+?) \| .+ \| .+ \|$", page, re.M)
    ][1:]
    assert len(rejected) == 10
    files = {
        f.relative_to(ROOT): " ".join(f.read_text(encoding="utf-8").split())
        for f in ROOT.rglob("*.py")
    }
    parts = [
        part.strip(" .")
        for row in rejected
        for part in (row, *row.split(";"))
        if len(part.split()) > 3
    ]
    assert {
        (str(name), part) for name, text in files.items() for part in parts if part in text
    } == set()


def test_the_page_lists_the_files_that_there_are():
    """`python docs/generate_architecture.py` writes the list; lines may drift a little before it is run again."""
    listed = {
        path: int(n)
        for path, n in re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", PAGE.read_text("utf-8"), re.M)
    }
    lines = {
        f.relative_to(ROOT).as_posix(): f.read_text("utf-8").count("\n") for f in ROOT.rglob("*.py")
    }
    assert set(listed) == {path for path, n in lines.items() if n > 1}
    assert {path: n for path, n in listed.items() if abs(n - lines[path]) > max(20, 0.15 * n)} == {}


def test_names_of_test_files_differ():
    """Two of the same name are one module to pytest, and the second is not run."""
    names = collections.Counter(file.name for file in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_the_drawing_of_layers_names_what_there_is():
    """Every file and folder in the block exists, and no layer is missing from it."""
    drawn = PAGE.read_text("utf-8").split("## Layers")[1].split("## ")[0]
    block = "\n".join(line for line in drawn.splitlines() if line.startswith("    "))
    named = re.findall(r"(?<!\S)(\w+(?:/|\.py))(?!\S)", block)
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert {name.rstrip("/").removesuffix(".py") for name in named} == set().union(*LAYERS)


def test_modules_have_moved_to_where_the_changelog_says():
    moved = (
        (PAGE.parents[1] / "CHANGELOG.md")
        .read_text("utf-8")
        .split("### Modules that moved")[1]
        .split("\n## ")[0]
    )
    places = [row.split(" | ")[1] for row in moved.splitlines() if row.startswith("| `")]
    found = [name for place in places for name in re.findall(r"`(scaffpd[\w.{},]*)`", place)]
    assert len(found) >= len(places) > 5
    for name in found:
        home, _, several = name.partition(".{")
        for module in (
            [f"{home}.{one}" for one in several.rstrip("}").split(",")] if several else [home]
        ):
            path = ROOT.joinpath(*module.split(".")[1:])
            assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module
