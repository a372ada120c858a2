"""The site: its pages of commands and names are complete and fresh, its links hold, nothing comes from elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shlex
import shutil

import pytest
import yaml

import scaffpd as sp
from snippets import ROOT, blocks, pages, understood


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate_cli", ROOT / "docs" / "generate_cli.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_commands_is_fresh(generate):
    fresh = generate.main(["--check"]) == 0
    assert fresh, "docs/cli.md is not what the commands say: run python docs/generate_cli.py"


def test_the_page_of_commands_has_them_all(generate):
    import typer

    from scaffpd.cli import app

    text = generate.PAGE.read_text(encoding="utf-8")
    found = dict(generate.commands(typer.main.get_command(app), "scaffpd"))
    assert {"scaffpd demo", "scaffpd compare", "scaffpd deploy local", "scaffpd silo check"} <= set(
        found
    )
    for name in found:
        assert re.search(rf"^##+ `{name}`$", text, flags=re.MULTILINE), name
    for code in ("`0`", "`2`", "`130`"):
        assert code in text.split("## Exit codes")[1].split("##")[0]


def test_a_changed_command_makes_the_page_stale(generate, monkeypatch):
    import typer

    import scaffpd.cli

    app = typer.Typer(help="Another.")
    app.command("other")(lambda much: None)
    monkeypatch.setattr(scaffpd.cli, "app", app)
    assert generate.main(["--check"]) == 1


def test_the_examples_in_the_page_of_commands_are_understood(generate):
    for code in blocks(generate.PAGE, "console"):
        for line in code.splitlines():
            understood(shlex.split(line, comments=True))


def test_every_public_name_is_in_the_reference():
    """By the public name, or by where it is defined where a module bears the same name."""
    listed = [
        name
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    assert len(listed) == len(set(listed))
    shown = [place(name) for name in listed]
    assert not [name for name, thing in zip(listed, shown, strict=True) if inspect.ismodule(thing)]
    for home in (sp, sp.data):
        public = {name: getattr(home, name) for name in home.__all__ if name != "Pictures"}
        missing = [
            name
            for name, thing in public.items()
            if not inspect.ismodule(thing) and thing not in shown
        ]
        assert not missing, f"docs/reference/ lacks {missing}"


def place(dotted):
    """What a dotted name stands for in the source, where a module goes before a name of the same spelling."""
    try:
        return importlib.import_module(dotted)
    except ImportError:
        home, name = dotted.rsplit(".", 1)
        return getattr(place(home), name)


def test_nothing_is_fetched_when_a_page_is_read():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    assert "http" not in settings
    assert yaml.safe_load(settings)["theme"]["font"] is False


def build(folder):
    from mkdocs.commands.build import build as mkdocs_build
    from mkdocs.config import load_config

    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    strings = next(
        one for one in settings["plugins"] if isinstance(one, dict) and "mkdocstrings" in one
    )
    strings["mkdocstrings"]["handlers"]["python"]["options"]["separate_signature"] = False
    plain = [
        {"pymdownx.highlight": {"use_pygments": False}}
    ]  # no link, name or page depends on colours and search
    extensions = [
        one for one in settings["markdown_extensions"] if "pymdownx.highlight" not in one
    ] + plain
    chosen = {"plugins": [strings], "markdown_extensions": extensions}
    mkdocs_build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True, **chosen))


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="MkDocs Material is not installed"
)
def test_it_builds_strictly_and_links_hold(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build(tmp_path)
    pages = [
        page for page in tmp_path.rglob("*.html") if page.name != "404.html"
    ]  # that one is for a server's root
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(
            r"""(?:<script[^>]+src|<link[^>]+stylesheet[^>]+href|<img[^>]+src)=["']?https?:""", text
        )
        for target in re.findall(r"""(?:href|src)=["']([^"'#?]+)""", text):
            if not re.match(r"(https?|mailto|data):|//", target):
                assert (page.parent / target).exists(), (
                    f"{page.relative_to(tmp_path)} links to {target}"
                )


@pytest.fixture
def repository(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("repository")


@pytest.mark.parametrize(
    ("prose", "shown"),
    [
        ("Σ p_i f_i^{q+1}", "Σ p<sub>i</sub> f<sub>i</sub><sup>q+1</sup>"),
        ("1/max_i L_i and Vᵀc_i", "1/max<sub>i</sub> L<sub>i</sub> and Vᵀc<sub>i</sub>"),
        ("the pair (x*, λ*) is *the* one", "the pair (x&#42;, λ&#42;) is *the* one"),
        ("make_demo, worst_20 and **x** stay", "make_demo, worst_20 and **x** stay"),
        ("    f_i in code stays", "    f_i in code stays"),
        ("# A heading with f_i", "# A heading with f_i"),
    ],
)
def test_indices_are_set_as_such(repository, prose, shown):
    assert repository.raised(prose) == shown


def test_a_link_to_nothing_is_noticed(repository):
    from mkdocs.exceptions import PluginError

    class Here:
        file = type("File", (), {"src_uri": "methods.md"})

    config = type("Config", (), {"docs_dir": str(ROOT / "docs")})
    turned = repository.on_page_markdown(
        "[a](../tests/snippets.py) `[b](nowhere.md)`", Here, config, []
    )
    assert turned == "a `[b](nowhere.md)`"
    with pytest.raises(PluginError, match="nowhere"):
        repository.on_page_markdown("[a](nowhere.md)", Here, config, [])


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_docs_makes_the_page_of_commands_first():
    import subprocess

    done = subprocess.run(
        ["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.index("generate_cli.py") < done.stdout.index("mkdocs build --strict")


def test_every_table_has_a_header():
    """A blank line inside a table leaves the rows below it without one."""
    for page in pages():
        lines = ["", *page.read_text(encoding="utf-8").splitlines(), ""]
        starts = [
            k
            for k in range(1, len(lines) - 1)
            if lines[k].startswith("| ") and not lines[k - 1].startswith("|")
        ]
        for k in starts:
            assert re.fullmatch(r"\|(:?-+:?\|)+", lines[k + 1]), (
                f"{page.name}, line {k}: {lines[k][:60]}"
            )
