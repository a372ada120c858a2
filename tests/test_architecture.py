"""Budgets of shape that every change must meet, and imports that only point down."""

import ast
import collections
import functools
import graphlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import scaffpd

ROOT = Path(scaffpd.__file__).parent
TESTS = Path(__file__).parent
LONGEST = 500  # lines of a file
FRONT_DOOR = r"(?m)^\s*(import scaffpd as|from scaffpd import (?!__version__))"
PRIVATE_WORDS = r"\b(told|untold|kept|weighed|weighing|apart|is there already)\b"

# What is measured, and the most that is allowed; lower a number as soon as it can be lowered.
BUDGETS = {
    "files over 500 lines": 0,
    "mentions of Any": 60,
    "fmt: skip": 0,
    "private words": 0,
    "class names used twice": 0,
    "imports that point up": 0,
    "imports through the front door": 0,
}

# From the bottom up. A room may import from lower floors, and from rooms before it on its own.
FLOORS = [
    ["errors", "fields", "numbers", "machine", "files", "descent"],
    ["objectives", "federation", "data"],
    ["models", "privacy", "secure", "algorithms"],
    ["tasks", "data.tabular", "training"],
    ["study", "pipeline"],
    ["estimators", "settings", "report", "program"],
    ["deploy", "cli"],
]
HEIGHT = {room: place for place, room in enumerate(room for floor in FLOORS for room in floor)}
FORBIDDEN = {  # a method knows neither models nor runtimes; local work knows nothing of deployment
    ("algorithms", "models"),
    ("algorithms", "secure"),
    ("program", "deploy"),
}

# The core: what a program needs that has its data in memory. It imports the standard library,
# these packages, and no module of ours that is not the core's.
CORE = (
    *("errors", "numbers", "machine", "files", "descent", "objectives", "federation", "data"),
    *(
        "models",
        "privacy",
        "secure",
        "algorithms",
        "tasks",
        "training",
        "pipeline",
        "study",
        "estimators",
    ),
)
CORE_PACKAGES = {"numpy", "scipy", "torch"}
READERS = "scaffpd.data.tabular"  # of tables from files, but for
PLAIN = tuple(f"{READERS}.{name}" for name in ("agree", "columns", "encode", "questions"))
# What the core imports besides, where it is used, or in a room of its own.
BESIDES = {
    ("estimators", "sklearn"): "scikit-learn's own interface",
    ("data.datasets", "sklearn"): "the digits are scikit-learn's",
    ("models.execution", "joblib"): "several processes at a time; one needs nothing",
    ("training.progress", "rich"): "a bar where it is installed, a line where it is not",
    ("files", "filelock"): "locks of folders that several processes write to",
    ("privacy.accountant", "dp_accounting"): "the extra `privacy`",
    ("privacy.noise", "cryptography"): "the extra `privacy`",
    ("secure.keys", "cryptography"): "the extra `privacy`",
}


@functools.cache
def sources():
    return {
        file.relative_to(ROOT): file.read_text(encoding="utf-8")
        for file in sorted(ROOT.rglob("*.py"))
    }


@functools.cache
def trees():
    """{module: its syntax tree}, without the front door, which opens every room."""
    found = {}
    for path, text in sources().items():
        module = ".".join(("scaffpd", *path.with_suffix("").parts)).removesuffix(".__init__")
        found[module] = ast.parse(text)
    return {
        name: tree for name, tree in found.items() if name not in ("scaffpd", "scaffpd.__main__")
    }


def statements(tree):
    left = list(tree.body)
    while left:
        statement = left.pop()
        for inner in ("body", "orelse", "handlers", "finalbody", "cases"):
            left += getattr(statement, inner, [])
        yield statement


@functools.cache
def imports():
    """{module: modules of ours that it imports}, inside functions and for type checkers too."""
    graph = {}
    for name, tree in trees().items():
        used = set()
        for node in statements(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scaffpd"):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    used.add(inner if inner in trees() else node.module)
            elif isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names if alias.name in trees()}
        graph[name] = used - {name, "scaffpd"}
    return graph


def room_of(module):
    """The room of a module: a part of a package may be a room of its own."""
    parts = module.split(".")[1:]
    part = ".".join(parts[:2])
    return part if part in HEIGHT else parts[0]


def upward():
    """Imports that do not point down, or that are forbidden."""
    wrong = []
    for name, used in imports().items():
        room = room_of(name)
        for other in set(map(room_of, used)) - {room}:
            if HEIGHT[other] >= HEIGHT[room] or (room, other) in FORBIDDEN:
                wrong.append(f"{name} imports scaffpd.{other}")
    return wrong


def executed(tree):
    """Every node, but for what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from executed(ast.Module(node.orelse, []))
        else:
            yield node
            yield from executed(node)


def imported(tree):
    """Modules that are imported, in functions and by name as well."""
    for node in executed(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "needed"):
            yield from (one.value for one in node.args[:1] if isinstance(one, ast.Constant))


def core(module):
    """Whether a module is the core's."""
    reads = module.startswith(READERS) and module not in (READERS, *PLAIN)
    return module.split(".")[1] in CORE and not reads


def foreign():
    """(module without our name, package) of the core's imports of what is not the core."""
    for module, tree in trees().items():
        if not core(module):
            continue
        for name in set(imported(tree)):
            top = name.partition(".")[0]
            if top == "scaffpd":
                if name in trees() and not core(name):
                    yield module.removeprefix("scaffpd."), name
            elif top not in sys.stdlib_module_names and top not in CORE_PACKAGES:
                yield module.removeprefix("scaffpd."), top


def repeated():
    homes = collections.defaultdict(list)
    for name, tree in trees().items():
        for node in statements(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    return [f"{name}: {', '.join(where)}" for name, where in homes.items() if len(where) > 1]


def mentions(pattern):
    found = {path: len(re.findall(pattern, text)) for path, text in sources().items()}
    return collections.Counter({str(path): times for path, times in found.items() if times})


def test_all_budgets():
    """Every number in the table, so that one run names all that are exceeded."""
    long = {str(p): text.count("\n") for p, text in sources().items() if text.count("\n") > LONGEST}
    words = mentions(PRIVATE_WORDS)
    front = mentions(FRONT_DOOR)
    found = {
        "files over 500 lines": (len(long), sorted(long.items(), key=lambda item: -item[1])),
        "mentions of Any": (mentions(r"\bAny\b").total(), mentions(r"\bAny\b").most_common(8)),
        "fmt: skip": (mentions("fmt: skip").total(), mentions("fmt: skip").most_common(8)),
        "private words": (words.total(), words.most_common(8)),
        "class names used twice": (len(repeated()), repeated()),
        "imports that point up": (len(upward()), upward()),
        "imports through the front door": (front.total(), front.most_common(8)),
    }
    assert found.keys() == BUDGETS.keys()
    exceeded = {
        name: f"{number:,} > {BUDGETS[name]:,} {where}"
        for name, (number, where) in found.items()
        if number > BUDGETS[name]
    }
    assert exceeded == {}, "\n".join(f"{name}: {why}" for name, why in exceeded.items())


def test_the_core_imports_numpy_scipy_and_torch():
    found = set(foreign())
    known = {
        (module, package)
        for module, package in found
        for room, other in BESIDES
        if other == package and (module == room or module.startswith(f"{room}."))
    }
    assert found - known == set()
    assert {package for _, package in known} == {package for _, package in BESIDES}


def test_the_core_trains_where_nothing_else_is_installed():
    code = """
import bare
bare.hide_all_but(*bare.CORE)
import numpy as np
import scaffpd as sp
from scaffpd.data.silos import Silos

random = np.random.default_rng(0)
silos = [(random.normal(size=(30, 3)), random.integers(0, 2, 30)) for _ in range(3)]
model = sp.Linear("logistic", l2=0.1)
cohort = sp.Cohort(silos, model)
for method in (sp.fair(sp.ChiSquare(rho=0.1)), sp.Scaffold()):
    result = sp.train(method, cohort, rounds=20)
    assert np.isfinite(result.history.losses).all()
method = sp.fair(sp.ChiSquare(rho=0.1))
assert sp.train(method, cohort, tol=1e-6, progress=True).status == "converged"
silos = Silos(("a", "b", "c"), silos, silos, ("u", "v", "w"))
found = sp.compare({"FedAvg": sp.FedAvg()}, sp.Problem(silos, model), rounds=3, tune=1)
assert not found.runs[0].failed
assert len(sp.path([sp.Average(), sp.Tilted(1.0)], cohort, tol=1e-6)) == 2
try:
    import pydantic
except ModuleNotFoundError:
    print("bare")
"""
    here = os.pathsep.join([str(ROOT.parent), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": here},
    )
    assert done.stdout == "bare\n", done.stderr
    assert done.stderr.startswith("round ")  # the line in the place of a bar
    assert done.stderr.count("\n") == 1


def test_experiments_do_without_benchmarks():
    home = ROOT.parents[1]
    modules = {file.stem for file in (home / "benchmarks").iterdir() if file.stem.islower()}
    found = [
        f"{file.relative_to(home)}: {name}"
        for file in (home / "experiments").rglob("*.py")
        for name in imported(ast.parse(file.read_text(encoding="utf-8")))
        if name.partition(".")[0] in {"benchmarks", *modules}
    ]
    assert found == []


# Where the name of a task or a loss is compared, and why it cannot be asked instead.
NAMED = {
    "scaffpd.algorithms.evidence": "a method knows no models: the loss is a name to it",
    "scaffpd.deploy.rows": "its counts are of rows between edges, and no task",
}


def compared(tree):
    """Texts that are compared, looked for in a literal, matched, or keys of a dict."""
    for node in ast.walk(tree):
        parts = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            parts = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        for part in parts:
            cells = part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else [part]
            for cell in cells:
                if isinstance(cell, ast.Constant) and isinstance(cell.value, str):
                    yield cell.value
                elif isinstance(cell, ast.Name | ast.Attribute) and ast.unparse(cell).isupper():
                    yield cell.id if isinstance(cell, ast.Name) else cell.attr


def test_nobody_asks_which_task_or_loss_it_is():
    """Outside of `tasks` and `models`, which know them: others ask what they need to know."""
    from scaffpd.models.losses import BUILT_IN
    from scaffpd.tasks import TASKS

    known = {loss.name for loss in BUILT_IN} | {task.name for task in TASKS}
    known |= {loss for task in TASKS for loss in task.losses}
    assert known > {"cox", "hazard", "squared", "survival", "classification"}
    found = {}
    for name, tree in trees().items():
        constants = {  # names that stand for such a text, wherever they were assigned
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and node.value.value in known
            for target in node.targets
            if isinstance(target, ast.Name) and target.id.isupper()
        }
        found[name] = constants, set(compared(tree))
    words = known.union(*(constants for constants, _ in found.values()))
    asking = {
        name: here & words
        for name, (_, here) in found.items()
        if name.split(".")[1] not in ("tasks", "models") and here & words
    }
    assert asking.keys() == NAMED.keys(), asking


def test_every_room_has_a_floor():
    assert {room_of(name) for name in trees()} == set(HEIGHT)


def test_no_module_imports_itself_by_way_of_others():
    graphlib.TopologicalSorter(imports()).prepare()  # raises CycleError, which names the modules


def test_importing_the_package_loads_nothing_heavy():
    heavy = {
        "torch",
        "scipy",
        "sklearn",
        "matplotlib",
        "rich",
        "click",
        "pydantic",
        "pandas",
        "numpy",
    }
    code = f"import sys, scaffpd; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_watching_a_silo_loads_no_torch():
    """`silo start` runs for months, and the names of methods are known without them."""
    code = """
import sys
import scaffpd.cli.silo
import scaffpd.deploy.flare.serving
import scaffpd.deploy.records
import scaffpd.settings.silo
from scaffpd.settings.tables import NAMES
assert "torch" not in sys.modules
from scaffpd.algorithms import ALGORITHMS
from scaffpd.objectives import OBJECTIVES
assert NAMES >= {*ALGORITHMS, *OBJECTIVES}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_can_be_imported():
    for name in scaffpd.__all__:
        assert getattr(scaffpd, name) is not None
    assert set(scaffpd.__all__) <= set(dir(scaffpd))
    with pytest.raises(AttributeError, match="did you mean 'Cohort'"):
        _ = scaffpd.Cohrt


def test_every_refusal_has_a_code_that_reads_like_one():
    found = [
        node.args[0].value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "InputError"
        if isinstance(node.args[0], ast.Constant)
    ]
    assert len(found) > 300
    assert [code for code in found if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code)] == []


def test_names_of_test_files_differ():
    """Two of the same name are one module to pytest, and the second is not run."""
    names = collections.Counter(file.name for file in TESTS.rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []
