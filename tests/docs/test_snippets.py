"""Every snippet of every page runs, every command is one that exists, and every name that a fragment uses is there."""

from __future__ import annotations

import re

import pytest

import scaffpd as sp
from scaffpd.study import choosing
from scaffpd.study import joining as gains
from snippets import ROOT, blocks, commands, pages, run_python, understood


def named(page):
    return page.relative_to(ROOT).as_posix()


# by test_readme.py and by tests of their own in this folder
RUN_ELSEWHERE = {"README.md", "docs/extending.md", "docs/faq.md", "docs/objectives.md"}
WITH_PYTHON = [
    page for page in pages() if blocks(page, "python") and named(page) not in RUN_ELSEWHERE
]
TAKEN_ELSEWHERE = {"cli.md"}  # usage lines, not commands


@pytest.mark.parametrize("page", WITH_PYTHON, ids=named)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    """With few rounds, splits, strengths and orders: what they lead to is tested elsewhere."""
    train = sp.train
    tct = sp.tct
    coalition = sp.coalition
    monkeypatch.setattr(
        sp, "train", lambda *what, rounds=12, **more: train(*what, rounds=min(rounds, 12), **more)
    )
    few = {"network_rounds": 2, "rounds": 10}
    monkeypatch.setattr(sp, "tct", lambda *what, **more: tct(*what, **(more | few)))
    monkeypatch.setattr(
        sp,
        "coalition",
        lambda *what, **more: coalition(*what, **(more | {"most": 3, "permutations": 2})),
    )
    for name, short in (
        ("L2S", choosing.L2S[1:3]),
        ("KAPPAS", choosing.KAPPAS[::2]),
        ("STRENGTHS", 1),
    ):
        monkeypatch.setattr(choosing, name, short)
    monkeypatch.setattr(gains, "PATH", gains.PATH[::3])
    monkeypatch.chdir(tmp_path)
    run_python(page)


@pytest.mark.parametrize("page", pages(), ids=named)
def test_fragments_are_python_and_use_names_that_exist(page):
    for code in blocks(page, "python", fragments=True):
        compile(code, page.name, "exec")
        for dotted in re.findall(r"\bsp((?:\.\w+)+)", code):
            place = sp
            for name in dotted.split(".")[1:]:
                if isinstance(place, type(sp)):
                    place = getattr(place, name)


@pytest.mark.parametrize("page", pages(), ids=named)
def test_commands_are_understood(page):
    if page.name in TAKEN_ELSEWHERE:
        return
    for words in commands(page):
        understood(words)


def test_a_command_that_does_not_exist_is_noticed():
    for line in (
        "scaffpd deno",
        "scaffpd compare digits --seed-s 3",
        "scaffpd deploy locale",
        "scaffpd demo --rho",
    ):
        with pytest.raises(Exception, match=r".+"):
            understood(line.split())
    with pytest.raises(Exception, match=r".+"):
        understood(["python", "-m", "experiments.reproduce", "cifar10", "--smal"])
    understood(["scaffpd", "deploy", "local", "--silos", "4"])


@pytest.mark.long
def test_cheap_commands_run(tmp_path, monkeypatch):
    """As tests/test_synthetic_figures.py does with another seed."""
    from experiments.reproduce import run

    monkeypatch.chdir(tmp_path)
    cheap = [words for words in commands(ROOT / "docs" / "reproducing.md") if "--quick" in words]
    assert cheap
    for words in cheap:
        assert run([*words[3:], "--quiet"]) == 0
    assert list(tmp_path.glob("quick/*.png"))
