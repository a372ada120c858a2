"""The page in a real Chromium: it loads alone, draws everything, and answers to clicks and keys."""

from __future__ import annotations

import csv
import math
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import run_folders

from scaffpd.run import page as report
from scaffpd.run.page.read import read

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
RESULTS = Path(__file__).parents[2] / "results"
MARKS = "svg .mark-symbol path, svg .mark-line path, svg .mark-rect path, svg .mark-rule line"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


class Opened:
    """A page with everything that it said and asked for."""

    def __init__(self, browser, file, **look):
        self.file = file
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "color_scheme": "light", **look}
        )
        self.page = self.context.new_page()
        self.said = []
        self.asked = []
        self.alerts = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on(
            "dialog", lambda dialog: (self.alerts.append(dialog.message), dialog.dismiss())
        )
        self.page.goto(self.file.as_uri())
        self.ready()

    def ready(self):
        self.page.wait_for_selector("html[data-ready=yes]", timeout=30_000)

    def click(self, selector):
        self.page.click(selector)
        self.ready()

    def count(self, selector):
        return self.page.locator(selector).count()

    def alone(self):
        assert self.said == []
        assert self.asked == [self.file.as_uri()]
        assert self.alerts == []

    def overflow(self):
        return self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )

    def column(self, name):
        return self.page.eval_on_selector_all(
            "#client-table thead th",
            "(heads, name) => { const k = heads.findIndex((h) => h.textContent.trim() === name);"
            " const rows = Array.from(document.querySelectorAll('#client-table tbody tr'));"
            " return rows.map((row) => row.cells[k].dataset.v); }",
            name,
        )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The page of a folder, made once."""
    files = {}
    place = tmp_path_factory.mktemp("pages")

    def write(folder):
        if folder not in files:
            files[folder] = report.write(folder, place / f"{len(files)}.html")
        return files[folder]

    return write


@pytest.fixture(scope="module")
def opened(browser, written):
    """A folder's page, opened once: a test finds it as it was drawn, and leaves it so."""
    idle = {}
    contexts = []

    @contextmanager
    def open_page(folder, **look):
        key = (folder, repr(look))
        page = idle.pop(key, None)
        if page is None:
            page = Opened(browser, written(folder), **look)
            contexts.append(page.context)
        yield page
        idle[key] = page  # after a failure, the next test opens another one

    yield open_page
    for context in contexts:
        context.close()


FIGURES = {
    "hospitals": {"clients", "weights", "certificate", "losses", "communication", "partition"},
    "digits": {
        "clients",
        "tradeoff",
        "weights",
        "certificate",
        "losses",
        "communication",
        "partition",
    },
    "path": {"clients", "tradeoff", "weights", "certificate", "losses", "communication"},
    "diabetes": {"clients", "weights", "certificate", "losses", "communication", "partition"},
    "hostile": {"clients", "weights", "certificate", "losses", "communication", "partition"},
    "stations": {
        "joining",
        "strengths",
        "coalition",
        "shares",
        "clients",
        "weights",
        "certificate",
        "losses",
        "communication",
        "partition",
    },
    "deployed": {"clients", "weights", "certificate", "losses", "absent"},
}


LIKE_OTHERS = ("path", "diabetes")  # their figures are those of other runs
PHONE = {"viewport": {"width": 390, "height": 740}}
LOOK = {
    "hostile": PHONE,
    "deployed": PHONE,
}  # to open a page takes a second: these are not opened for a desk as well


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n in LIKE_OTHERS else n for n in FIGURES]
)
def test_every_figure_is_drawn_without_a_word_or_a_request(request, opened, name):
    with opened(request.getfixturevalue(name), **LOOK.get(name, {})) as page:
        page.alone()
        drawn = page.page.eval_on_selector_all(
            "figure", "all => all.map((f) => f.id.replace('figure-', ''))"
        )
        assert set(drawn) == FIGURES[name]
        for figure in drawn:
            assert page.count(f"#figure-{figure} svg[role=img][aria-label]") == 1
            assert page.count(f"#figure-{figure} :is({MARKS})") > 2, figure
        assert page.overflow() == 0


@pytest.mark.parametrize("name", ["digits", pytest.param("hospitals", marks=pytest.mark.long)])
def test_a_comparison_opens(opened, name):
    with opened(RESULTS / name) as page:
        page.alone()
        assert page.count("#figure-clients .mark-symbol path") > 4
        assert page.count(".chip") == 15
        assert page.count(".chip[aria-pressed=true]") == 2
        page.click("#every")
        assert page.count(".chip[aria-pressed=true]") == 15


def test_a_chip_acts_on_charts_and_table(opened, digits):
    with opened(digits) as page:
        dots = "#figure-clients .mark-symbol.role-mark path"
        before = page.count(dots)
        lines = page.count("#figure-certificate .mark-line path[d^=M]")
        chip = ".chip:has-text('worst case')"
        page.click(chip)
        assert page.page.get_attribute(chip, "aria-pressed") == "false"
        assert page.count(dots) == before - 20
        assert page.count("#figure-certificate .mark-line path[d^=M]") == lines - 1
        assert not page.page.is_visible("#client-table th:has-text('worst case')")
        page.page.focus(chip)
        page.page.keyboard.press("Space")
        page.ready()
        assert page.count(dots) == before
        page.alone()


def test_pairs_go_with_their_models(opened, hospitals):
    with opened(hospitals) as page:
        rules = "#figure-clients .mark-rule.role-mark line"
        assert page.count(rules) == 4
        page.click(".chip:has-text('average')")
        assert page.count(rules) == 0
        page.click(".chip:has-text('fair')")  # the last one stays on
        assert page.count("#figure-clients .mark-symbol.role-mark path") == 4
        assert page.page.get_attribute(".chip:has-text('fair')", "aria-pressed") == "true"
        page.click(".chip:has-text('average')")
        assert page.count(rules) == 4
        page.alone()


def test_a_model_without_a_certificate_alone(opened, hostile):
    """The certificate's chart has nothing to draw then, and does not complain."""
    with opened(hostile, **PHONE) as page:
        page.click(".chip:has-text('fair')")
        assert page.count("#figure-certificate .mark-symbol.role-mark path") == 0
        assert page.count("#figure-losses .mark-symbol.role-mark path") > 4
        page.click(".chip:has-text('fair')")
        assert page.count("#figure-certificate .mark-symbol.role-mark path") > 0
        page.alone()


UNFOLD = "details.trained > summary"


def test_training_is_folded_away_and_its_charts_fit_when_unfolded(opened, hospitals):
    with opened(hospitals) as page:
        figures = ["weights", "certificate", "losses", "communication"]
        assert not any(page.page.is_visible(f"#figure-{name}") for name in figures)
        assert not page.page.is_visible("text=proven gap")
        page.click(UNFOLD)
        for name in figures:
            frame, chart = (
                page.page.locator(f"#figure-{name}{part}").bounding_box() for part in ("", " svg")
            )
            assert frame["width"] - 4 <= chart["width"] <= frame["width"], name
        assert page.overflow() == 0
        page.click(UNFOLD)


def test_the_first_screen_answers_five_questions(opened, stations, hospitals):
    for folder in (stations, hospitals):
        with opened(folder) as page:
            asked = page.page.locator(".answers dt")
            words = asked.all_text_contents()
            assert [text.split()[0] for text in words] == ["Who", "How", "What", "Whom", "How"]
            below = "document.querySelector('.answers').getBoundingClientRect().bottom + scrollY"
            assert page.page.evaluate(below) < 900


def inside(page, figure):
    """Every word of a chart lies within its picture."""
    return page.page.evaluate(
        """(name) => {
            const picture = document.querySelector(`#figure-${name} svg`).getBoundingClientRect();
            const words = Array.from(document.querySelectorAll(`#figure-${name} svg text`));
            return words.map((text) => [text.textContent, text.getBoundingClientRect()])
                .filter(([, box]) => box.width && (box.left < picture.left - 1 || box.right > picture.right + 1))
                .map(([text]) => text);
        }""",
        figure,
    )


NIGHT = {**PHONE, "color_scheme": "dark"}


@pytest.mark.parametrize("width", [1280, 390])
def test_no_label_is_cut_off(opened, stations, width):
    with opened(stations, **({} if width == 1280 else NIGHT)) as page:
        for figure in FIGURES["stations"] - {"weights", "certificate", "losses", "communication"}:
            assert inside(page, figure) == [], figure
        names = page.page.locator("#figure-coalition .role-axis-label text").all_text_contents()
        assert "Aotizhongxin" in names
        assert width == 390 or not any("…" in name for name in names)


def test_what_is_clear_of_noise_is_marked_with_its_sign(opened, stations):
    with opened(stations) as page:
        said = page.page.locator("#figure-joining .mark-text text").all_text_contents()
        with (stations / "joining.csv").open(newline="", encoding="utf-8") as file:
            rows = [
                row for row in csv.DictReader(file) if row["model"] == read(stations).joining.shown
            ]
        assert len(rows) == 5
        for row in rows:
            gain = float(row["gain_over_alone"])
            sign = ("+" if gain > 0 else "−") if abs(gain) > 0.0005 else ""
            star = "" if row["pays"] == "within noise" else "*"
            assert any(text.startswith(sign) and text.endswith(f"%{star}") for text in said), row[
                "client"
            ]
        assert (
            sum(text.endswith("*") for text in said)
            == sum(row["pays"] != "within noise" for row in rows)
            > 0
        )


def test_the_chosen_strength_has_a_ring_and_cells_their_effects(opened, stations):
    with opened(stations) as page:
        points = read(stations).strengths
        assert points[0].strength == math.inf
        assert points[-1].strength == 0
        assert page.count("#figure-strengths .mark-symbol.role-mark path") == 2 * len(points) + 2
        labels = page.page.locator("#figure-strengths .role-axis-label text").all_text_contents()
        assert {"oneforall", "alone"} < {label.replace(" ", "") for label in labels}
        assert page.count("#figure-coalition .mark-rect.role-mark path") == 5 * 4
        run = read(stations).coalition
        cells = page.page.locator("#figure-coalition .mark-text.role-mark text").all_text_contents()
        shown = sorted(float(text.removesuffix("\u00a0%").replace("−", "-")) for text in cells)
        effects = sorted(100 * run.effect(i, j) for i in run.names for j in run.names if i != j)
        assert shown == pytest.approx(effects, abs=0.5)
        assert page.count("#figure-shares .mark-symbol.role-mark path") == 3 * 5
        page.alone()


def test_weights_follow_the_chosen_model_and_the_chips(opened, hospitals):
    with opened(hospitals) as page:
        page.click(UNFOLD)
        paths = "Array.from(document.querySelectorAll('#figure-weights .mark-line path'))"
        lines = f"{paths}.map((path) => path.getAttribute('d')).join()"
        fair = page.page.evaluate(lines)
        page.page.select_option("#figure-weights select", "average")
        page.ready()
        assert page.page.evaluate(lines) != fair
        page.click(".chip:has-text('average')")
        assert page.page.input_value("#figure-weights select") == "fair"
        assert page.page.evaluate(lines) == fair
        page.click(".chip:has-text('average')")
        page.click(UNFOLD)


def test_costs_can_be_switched(opened, hospitals):
    with opened(hospitals) as page:
        assert "megabytes" in page.page.text_content("#figure-communication .chart")
        page.click(UNFOLD)
        page.click("#figure-communication [data-view=rounds]")
        assert "megabytes" not in page.page.text_content("#figure-communication .chart")
        assert (
            page.page.get_attribute("#figure-communication [data-view=rounds]", "aria-pressed")
            == "true"
        )
        page.click("#figure-communication .views button >> nth=0")
        assert "megabytes" in page.page.text_content("#figure-communication .chart")
        page.click(UNFOLD)


def test_the_table_sorts_by_mouse_and_by_key(opened, digits):
    with opened(digits) as page:
        head = "#client-table th:has-text('rows trained on')"
        page.click(f"{head} button")
        values = [float(v) for v in page.column("rows trained on")]
        assert values == sorted(values)
        assert page.page.get_attribute(head, "aria-sort") == "ascending"
        page.page.focus(f"{head} button")
        page.page.keyboard.press("Enter")
        assert [float(v) for v in page.column("rows trained on")] == sorted(values, reverse=True)
        assert page.page.get_attribute(head, "aria-sort") == "descending"
        page.click("#client-table th:has-text('client') button")
        assert page.column("client")[:3] == ["client 0", "client 1", "client 2"]
        assert page.page.get_attribute(head, "aria-sort") == "none"
        page.page.fill("input[type=search]", "client 1")
        assert page.page.locator("#client-table tbody tr:visible").count() == 11
        assert page.page.text_content("[role=status]") == "11 of 20"
        page.page.fill("input[type=search]", "")


def test_light_and_dark(opened, hospitals, stations):
    with opened(hospitals) as page:
        paper = "getComputedStyle(document.body).backgroundColor"
        label = "document.querySelector('#figure-clients .mark-text text').getAttribute('fill')"
        light = page.page.evaluate(paper), page.page.evaluate(label)
        page.click("#theme")
        dark = page.page.evaluate(paper), page.page.evaluate(label)
        assert light[0] != dark[0]
        assert light[1] != dark[1]
        page.click("#theme")
        assert (page.page.evaluate(paper), page.page.evaluate(label)) == light
        page.page.emulate_media(
            color_scheme="dark"
        )  # the reader has chosen: the system no longer matters
        page.ready()
        assert page.page.evaluate(paper) == light[0]
        page.page.emulate_media(color_scheme="light")
        with opened(stations, **NIGHT) as other:  # which nobody has clicked on
            assert (other.page.evaluate(paper), other.page.evaluate(label)) == dark
        page.alone()


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(n, marks=pytest.mark.long) for n in ("hospitals", "path")),
        "hostile",
        "deployed",
        "stations",
    ],
)
def test_a_phone_never_scrolls_sideways(request, opened, name):
    with opened(request.getfixturevalue(name), **(NIGHT if name == "stations" else PHONE)) as page:
        assert page.overflow() == 0
        widths = page.page.eval_on_selector_all(
            ".chart svg", "all => all.map((s) => s.getBoundingClientRect().right)"
        )
        assert max(widths) <= 390


def test_print_is_light_and_has_no_buttons(opened, hospitals):
    with opened(hospitals) as page:
        page.click("#theme")
        assert (
            page.page.evaluate("getComputedStyle(document.body).backgroundColor")
            != "rgb(255, 255, 255)"
        )
        page.page.emulate_media(media="print")
        assert (
            page.page.evaluate("getComputedStyle(document.body).backgroundColor")
            == "rgb(255, 255, 255)"
        )
        for hidden in ("#theme", ".chips", ".views", "#copy"):
            assert not page.page.is_visible(hidden), hidden
        assert (
            page.page.evaluate("getComputedStyle(document.querySelector('.chart')).filter")
            != "none"
        )
        assert (
            page.page.evaluate("getComputedStyle(document.querySelector('figure')).breakInside")
            == "avoid"
        )
        assert len(page.page.pdf(format="A4")) > 20_000
        page.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.page.is_visible("#figure-certificate")  # paper cannot be unfolded
        page.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert not page.page.is_visible("#figure-certificate")
        page.page.emulate_media(media="screen")
        page.click("#theme")


def test_the_tooltip_shows_names_as_they_are(opened, hostile):
    with opened(hostile, **PHONE) as page:
        page.page.locator("#figure-clients .mark-symbol.role-mark path").last.hover()
        page.page.wait_for_selector("#vg-tooltip-element.visible")
        words = page.page.text_content("#vg-tooltip-element")
        assert any(name[:20] in words for name in run_folders.HOSTILE)
        assert page.count("img, b") == 0
        page.alone()


def test_a_thousand_clients_stay_small_and_legible(opened, tmp_path):
    with opened(run_folders.many(tmp_path / "many", rounds=12)) as page:
        page.alone()
        assert page.file.stat().st_size < 4e6
        assert page.count("canvas[role=img]") == 2
        data = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
        inked = f"(c) => {{ return {data}.some((v) => v); }}"
        assert all(page.page.locator("canvas[role=img]").nth(i).evaluate(inked) for i in range(2))
        assert page.count("#figure-weights .mark-line.role-mark path[d^=M]") <= 12
        assert page.overflow() == 0


def test_without_javascript_the_words_and_tables_are_there(browser, written, hospitals):
    file = written(hospitals)
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.is_visible("noscript p")
    assert page.is_visible("#client-table >> text=cleveland")
    context.close()
