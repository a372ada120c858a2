"""Every snippet of every page runs, every command is one that exists, and examples run as they
stand.
"""

import importlib.util
import inspect
import re
import runpy

import pytest

import scaffpd as sp
from cases.pages import ROOT, blocks, commands, pages, run_python, understood
from scaffpd.models import losses

README = ROOT / "README.md"


def named(page):
    return page.relative_to(ROOT).as_posix()


def page_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def quickly(tmp_path, monkeypatch):
    """Few rounds: what they lead to is tested elsewhere."""
    train = sp.train
    monkeypatch.setattr(
        sp, "train", lambda *what, rounds=200, **more: train(*what, rounds=min(rounds, 200), **more)
    )
    for name in ("share", "huber"):  # losses that pages add are gone afterwards
        monkeypatch.setitem(losses.LOSSES, name, None)
        del losses.LOSSES[name]
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [p for p in pages() if blocks(p, "python")], ids=named)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, quickly, capsys):
    run_python(page)
    if page == README:
        shown = next(block for block in blocks(page, "text") if block.startswith("Average()"))
        gap = re.compile(r"\S+e-\d+")
        printed = capsys.readouterr().out
        assert gap.sub("·", printed).split() == gap.sub("·", shown).split()
        for now, said in zip(gap.findall(printed), gap.findall(shown), strict=True):
            # below 1e-11 a gap is rounding, in which processors differ
            assert max(float(now), 1e-11) == pytest.approx(max(float(said), 1e-11), rel=0.2)


def only_words(text):
    """The words of a text, with a dot for every number: the last digits differ by machine."""
    return " ".join(re.sub(r"[\d.⁰¹²³⁴-⁹⁻]+", "·", text).split())


@pytest.mark.long
@pytest.mark.parametrize("name", ["tutorial.md", "survival.md", "how-to/new-site.md"])
def test_commands_print_what_stands_below_them(name, tmp_path, monkeypatch, capfd):
    from scaffpd import cli

    page = ROOT / "docs" / name
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    run_python(page)
    for words in commands(page):
        if words[2] == "hospitals" or (tmp_path / words[2]).exists():
            assert cli.run(words[1:]) == 0
    heads = [path.read_text()[:2000] for path in tmp_path.glob("*.csv")]
    printed = only_words(" ".join([*capfd.readouterr(), *heads]))
    shown = [b for b in blocks(page, "text") if not b.startswith(("scaffpd ", "pip "))]
    assert shown
    for line in "".join(shown).splitlines():
        assert only_words(line) in printed, line


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *pages()], ids=named)
def test_files_that_a_page_names_exist(page):
    spans = re.findall(r"`([a-z_]+/[\w/.-]+\.pyi?)`", page.read_text(encoding="utf-8"))
    for place in spans:
        there = any((home / place).exists() for home in (ROOT, ROOT / "src" / "scaffpd"))
        assert there or "NAME" in place, f"{named(page)} names {place}"


@pytest.mark.parametrize("page", pages(), ids=named)
def test_commands_names_and_links_exist(page):
    for code in blocks(page, "python", fragments=True):
        compile(code, page.name, "exec")
        for dotted in re.findall(r"\bsp((?:\.\w+)+)", code):
            place = sp
            for name in dotted.split(".")[1:]:
                place = getattr(place, name) if inspect.ismodule(place) else place
    if page.name != "cli.md":  # usage lines, not commands
        for words in commands(page):
            understood(words)
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{named(page)} links to {target}"


MEASURED = sorted(
    page
    for folder in ("docs", "benchmarks", "results")
    for page in (ROOT / folder).rglob("*.md")
    if any(
        len(re.findall(r"\|\s*[\d.,]+\d[^|\n]*", table)) >= 6
        for table in re.findall(r"(?:^\|.*\n?)+", page.read_text(encoding="utf-8"), re.MULTILINE)
    )
)


@pytest.mark.parametrize("page", MEASURED, ids=named)
def test_tables_of_numbers_name_the_command_that_made_them(page):
    text = page.read_text(encoding="utf-8")
    programs = re.findall(r"(?:(?:benchmarks|experiments|docs|tests)/[\w/]+\.py)", text)
    programs += [
        name.replace(".", "/") for name in re.findall(r"python -m (experiments[\w.]*\w)", text)
    ]
    there = [
        any((ROOT / place).exists() for place in (name, f"{name}.py", f"{name}/__main__.py"))
        for name in programs
    ]
    assert any(there), f"{named(page)} has numbers and no command that exists"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_the_site_names_the_commit_of_a_page_s_tables():
    made = page_module(ROOT / "docs" / "repository.py").made
    for page in MEASURED:
        assert re.fullmatch(r"`[0-9a-f]{7,}` \(\d{4}-\d\d-\d\d\)", made(named(page))), page
    assert made("no/such/page.md") == ""


def test_a_command_that_does_not_exist_is_noticed():
    for line in ("scaffpd deno", "scaffpd train hospitals --seed-s 3", "scaffpd deploy locale"):
        with pytest.raises(Exception, match=r".+"):
            understood(line.split())


def test_the_page_of_commands_is_what_the_commands_say():
    module = page_module(ROOT / "docs" / "generate_cli.py")
    assert module.main(["--check"]) == 0, "run python docs/generate_cli.py"


def test_every_public_name_is_in_the_reference():
    text = "\n".join(p.read_text() for p in (ROOT / "docs" / "reference").glob("*.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)}
    for home in (sp, sp.data):
        public = {name for name in home.__all__ if not inspect.ismodule(getattr(home, name))}
        assert not public - shown


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_the_site_builds_strictly(tmp_path, monkeypatch):
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert "| file" not in (tmp_path / "architecture.html").read_text(encoding="utf-8")
    assert "study/comparison" in (tmp_path / "architecture.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=pytest.mark.long if "compare" in p.stem else ())
        for p in sorted((ROOT / "examples").glob("*.py"))
    ],
    ids=lambda path: path.stem,
)
def test_an_example_runs(path, tmp_path, monkeypatch):
    from sklearn import model_selection

    monkeypatch.chdir(tmp_path)
    folds = model_selection.StratifiedKFold
    monkeypatch.setattr(model_selection, "StratifiedKFold", lambda n, **more: folds(2, **more))
    import matplotlib.pyplot as plt  # here: it is slow to import

    plt.switch_backend("agg")
    runpy.run_path(str(path), run_name="__main__")
    plt.close("all")


def test_the_notebook_prints_what_is_stored_in_it(capsys):
    module = page_module(ROOT / "docs" / "generate_notebook.py")
    assert module.main(check=True) == 0, capsys.readouterr().out


def test_a_release_has_the_note_of_its_own_version_and_a_date():
    page = page_module(ROOT / "docs" / "release_note.py")
    changes = (
        "# Changes\n\n## 2.0.0 (2030-01-31)\n\nNew.\n\n### More\n\n## 1.0.0 (unreleased)\n\nOld.\n"
    )
    assert page.release_note("2.0.0", changes) == "New.\n\n### More"
    for version in ("1.0.0", "0.9.0"):
        with pytest.raises(SystemExit, match="heading"):
            page.release_note(version, changes)
