"""The page: one file that stands alone, drawn by a real browser where there is one."""

import json
import os
import re
import shutil
import sys
from types import SimpleNamespace

import pytest

from cases.records import model, record, rounds
from cases.refusals import refuses
from scaffpd import cli
from scaffpd.cli.results import show
from scaffpd.report import page as report
from scaffpd.report.page import embedded, harmless, pictures
from scaffpd.report.page.figures import figures
from scaffpd.report.page.vega import PALETTE, SERIES, SHAPES
from scaffpd.report.page.verdict import verdict
from scaffpd.report.record import PathRecord, RunRecord

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "\"quoted\" 'and' {{data}} & <b>bold</b>, comma",
    "Ω 医院 \u2028 🏥 \\ ]]>",
    "x" * 300,
)
FIGURES = {
    "hospitals": {
        "joining",
        "reliability",
        "coefficients",
        "certificate",
    },
    "hostile": {"clients", "certificate"},
    "path": {"clients", "tradeoff", "certificate"},
    "waiting": {"certificate"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run that is really trained, and three made by hand, by name."""
    home = tmp_path_factory.mktemp("report")
    out = ["--splits", "1", "--no-report", "--quiet", "--out", str(home / "hospitals")]
    assert cli.run(["train", "hospitals", *out]) == 0
    history = rounds(0.1, 1e-3, 1e-7, losses=(0.4,) * 4, weights=(0.25,) * 4)
    scores = dict(zip(HOSTILE, (0.5, 0.6, 0.7, 0.8), strict=True))
    better = {name: value + 0.05 for name, value in scores.items()}
    about = {"rows": 20, "history": history}
    hostile = (
        model(HOSTILE[0], scores, role="before", **about),
        model(HOSTILE[2], better, role="after", **about),
    )
    points = [
        model(f"ρ = {k}", {"a": 0.5 + 0.1 * k, "b": 0.9 - 0.05 * k}, history=history)
        for k in range(5)
    ]
    points[0] = points[0].model_copy(update={"role": "before"})
    points[2] = points[2].model_copy(update={"role": "after"})
    knee = PathRecord(parameter="rho", objective="ChiSquare", knee="ρ = 2", why="why.", rounds=9)
    waiting = model("deployed", {}, status="paused", message="va is away.", history=history)
    made = {
        "hostile": record(*hostile, title=HOSTILE[0]),
        "path": record(*points, kind="path", path=knee),
        "waiting": record(waiting, kind="deploy", word="silo", clients=list("abcd")),
    }
    for name, run in made.items():
        (home / name).mkdir()
        run.write(home / name)
    return {name: home / name for name in FIGURES}


def markup(text):
    return re.sub("<script.*?</script>", "", text, flags=re.S)


@pytest.mark.parametrize("name", FIGURES)
def test_a_run_has_the_figures_that_it_has_numbers_for(folders, name):
    run = RunRecord.read(folders[name])
    assert {figure.name for figure in figures(run)} == FIGURES[name]


def test_the_page_is_one_file_that_stands_alone(folders, tmp_path):
    written = report.write(folders["hospitals"], tmp_path / "page.html")
    text = written.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b|<script[^>]*\bsrc=", markup(text))
    assert "default-src 'none'" in text
    assert text.count("'sha256-") == 2
    assert "unsafe-eval" not in text.split("</head>")[0]
    run = RunRecord.read(folders["hospitals"])
    plain = text.replace("\u00a0", " ")
    assert plain.index(verdict(run)[0]) < plain.index('id="figure-joining"')
    assert f"<pre>{run.config.splitlines()[0]}" in text
    assert report.write(folders["hospitals"]) == folders["hospitals"] / "report.html"


def test_hostile_names_stay_text(folders, tmp_path):
    text = report.write(folders["hostile"], tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("</script>") == 3
    assert not re.search("<img|<b>bold|onerror=alert[^&]*>", markup(text))
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', text, re.S).group(1))
    assert {row["client"] for row in data["data"]["clients"]} == set(HOSTILE)
    # a name is data or a parameter, and never part of an expression
    expressions = re.findall(r'"(?:expr|labelExpr|filter|test)":"((?:[^"\\]|\\.)*)"', text)
    assert expressions
    assert not any(name[:9] in one for one in expressions for name in HOSTILE)


def test_what_is_embedded_cannot_end_its_script():
    text = embedded({"a": "</script><!--\u2028&"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--\u2028&"}
    assert "</script" not in harmless("x = '</script>'; y = '<!--'").lower()


def test_a_run_that_waits_has_a_page(folders):
    text = markup(report.page(RunRecord.read(folders["waiting"]), ""))
    assert "There is no result yet." in text
    assert "va is away." in text


def test_places_that_cannot_be_written(folders, tmp_path, monkeypatch):
    with refuses("page-is-folder"):
        report.write(folders["path"], tmp_path)
    old = tmp_path / "page.html"
    old.write_text("old")
    monkeypatch.setattr("scaffpd.report.page.page", lambda *_: "\ud800")  # cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        report.write(folders["path"], old)
    assert old.read_text() == "old"


@pytest.mark.parametrize("form", ["png", "svg"])
def test_every_figure_is_a_picture_too(folders, form):
    drawn = pictures(RunRecord.read(folders["hospitals"]), form)
    assert set(drawn) == {f"{name}.{form}" for name in FIGURES["hospitals"]}
    start = b"\x89PNG" if form == "png" else b"<svg"
    assert all(content.startswith(start) and len(content) > 2000 for content in drawn.values())
    if form == "svg":
        assert b"cleveland" in drawn["joining.svg"]
        assert b"proven gap" in drawn["certificate.svg"]


def test_many_clients_are_drawn_by_their_ends():
    before = {f"c{k:03d}": 0.5 for k in range(100)}
    after = {name: 0.5 + k / 1000 for k, name in enumerate(before)}
    run = record(model("average", before, role="before"), model("fair", after, role="after"))
    chart = next(figure for figure in figures(run) if figure.name == "clients")
    names = [row["client"] for row in chart.data["clients-changes"]]
    assert names == [f"c{k:03d}" for k in (*range(99, 69, -1), *range(29, -1, -1))]


def test_the_library_is_made_once_for_a_user(monkeypatch, tmp_path):
    """The second process finds it in the cache; a cache that cannot be written is no trouble."""
    made = []
    fake = SimpleNamespace(
        __version__="9.9", javascript_bundle=lambda: made.append(1) or "let vega = 'Ω';"
    )
    monkeypatch.setitem(sys.modules, "vl_convert", fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [report.library.__wrapped__() for _ in range(3)] == ["let vega = 'Ω';"] * 3
    assert len(made) == 1
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert report.library.__wrapped__() == "let vega = 'Ω';"


def test_the_command(folders, tmp_path, capsys, monkeypatch):
    run = str(folders["hospitals"])
    out = str(tmp_path / "r.html")
    assert cli.run(["report", run, "--out", out]) == 0
    assert capsys.readouterr().out.strip() == out
    assert cli.run(["report", run, "--format", "svg", "--out", str(tmp_path / "pictures")]) == 0
    assert len(capsys.readouterr().out.split()) == len(FIGURES["hospitals"])
    assert cli.run(["report", run, "--format", "svgg"]) == 2
    assert "did you mean 'svg'?" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert "vl-convert" in report.available()


@pytest.mark.parametrize("name", ["cleveland and the hills", "cleveland " * 9])
def test_names_are_never_broken_on_a_terminal_of_80_columns(
    folders, tmp_path, monkeypatch, capsys, name
):
    text = (folders["hospitals"] / "run.json").read_text(encoding="utf-8")
    (tmp_path / "run.json").write_text(text.replace('"cleveland"', json.dumps(name.strip())))
    monkeypatch.setenv("COLUMNS", "80")
    show(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for head in (k for k, line in enumerate(lines) if set(line) == {"─"}):
        first = sorted(line.split(" ")[0] for line in lines[head + 1 : head + 5])
        assert first == ["cleveland", "hungarian", "switzerland", "va"]


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_words_and_marks_stand_out_from_their_paper():
    for paper in (PALETTE["paper"], PALETTE["card"]):
        for word in ("ink", "soft", "gain", "loss", "accent"):
            assert contrast(PALETTE[word], paper) >= 4.5, word
        for mark in SERIES:
            assert contrast(mark, paper) >= 3, mark
    assert contrast(PALETTE["caution"], PALETTE["caution-paper"]) >= 4.5
    assert len(set(SERIES)) == len(SHAPES)


CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
MARKS = "svg .mark-symbol path, svg .mark-line path, svg .mark-rule line"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# words of a chart that its picture cuts off
CUT = """(figure) => {
    const picture = figure.querySelector("svg").getBoundingClientRect();
    return Array.from(figure.querySelectorAll("svg text"))
        .map((text) => [text.textContent, text.getBoundingClientRect()])
        .filter(([, box]) => box.width)
        .filter(([, box]) => box.left < picture.left - 1 || box.right > picture.right + 1
            || box.top < picture.top - 1)
        .map(([text]) => text);
}"""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium here")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def opened(browser, folders, tmp_path):
    """Open the page of a run; at the end it has said nothing, and asked for nothing but itself."""
    contexts = []
    said = []
    asked = []

    def open_page(name, width=1280):
        file = report.write(folders[name], tmp_path / f"{name}.html")
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready=yes]", timeout=30_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert all(url.startswith("file:") for url in asked)
    assert len(asked) == len(contexts)


@pytest.mark.parametrize(
    ("name", "width"), [("hospitals", 1280), ("hospitals", 390), ("hostile", 390), ("path", 1280)]
)
def test_every_figure_is_drawn_and_fits(opened, name, width):
    page = opened(name, width)
    for figure in FIGURES[name]:
        assert page.locator(f"#figure-{figure} svg[role=img][aria-label]").count() == 1
        assert page.locator(f"#figure-{figure} :is({MARKS})").count() > 2, figure
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for figure in {"joining", "clients", "reliability", "certificate"} & FIGURES[name]:
        assert page.locator(f"#figure-{figure}").evaluate(CUT) == [], figure
    assert page.evaluate(OVERFLOW) == 0


def test_what_is_clear_of_noise_is_marked(opened, folders):
    run = RunRecord.read(folders["hospitals"])
    texts = opened("hospitals").locator("#figure-joining .mark-text.role-mark text")
    texts = texts.all_text_contents()
    assert len(texts) == len(run.clients)
    clear = [client for client in run.clients if run.joining.pays(client) != "within noise"]
    assert sum(text.endswith("*") for text in texts) == len(clear)


def test_the_reader_sorts_and_unfolds(opened):
    page = opened("hospitals")
    page.click("summary:has-text('with intervals')")
    head = "details[open] th:has-text('alone'):not(:has-text('gain'))"
    cells = "details[open] tbody tr td:nth-child(3)"
    values = "all => all.map((cell) => Number(cell.dataset.v))"
    page.click(f"{head} button")
    first = page.eval_on_selector_all(cells, values)
    assert first == sorted(first)
    page.focus(f"{head} button")
    page.keyboard.press("Enter")
    assert page.eval_on_selector_all(cells, values) == sorted(first, reverse=True)
    assert page.get_attribute(head, "aria-sort") == "descending"
    assert not page.is_visible("#figure-certificate")
    page.click("details.trained:has(#figure-certificate) > summary")
    frame = page.locator("#figure-certificate").bounding_box()
    chart = page.locator("#figure-certificate svg").bounding_box()
    assert frame["width"] - 4 <= chart["width"] <= frame["width"]


def test_one_screen_has_the_answer_and_every_client(opened):
    page = opened("hospitals")
    words = page.locator(".answers dt").all_text_contents()
    assert [text.split()[0] for text in words] == ["Who", "How", "What", "What"]
    below = "document.querySelector('#figure-joining svg').getBoundingClientRect().bottom"
    assert page.evaluate(below) < 900
    assert page.locator("details[open]").count() == 0
