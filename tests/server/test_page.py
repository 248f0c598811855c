"""Promises about the page, in a real browser."""

from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from served_record import HOSTILE, TOKEN, Served, log_steps, make_record, make_run, serve

from windlass.record import annotate

RATES = ("0.001", "0.002", "0.003")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium (Debian: `apt-get install chromium`)"
)


def test_the_link_logs_in_and_leaves_no_token_behind(logged_in: Browser, served: Served) -> None:
    logged_in.open(f"{served.url}/#token={TOKEN}")
    assert logged_in.value("location.href") == f"{served.url}/#/runs"
    assert logged_in.value("document.cookie") == ""
    assert logged_in.value("document.querySelectorAll('.rows .row').length") == 3


def test_hostile_texts_are_shown_and_run_nothing(logged_in: Browser, served: Served) -> None:
    run = served.ids()[1]
    logged_in.events.clear()
    for place in ("runs", f"run/{run}", f"compare?ids={','.join(served.ids())}"):
        logged_in.open(f"{served.url}/#/{place}")
        assert HOSTILE[0] in logged_in.value("document.body.innerText")
        assert "pwned" not in logged_in.value("document.title").replace(HOSTILE[0], "")
        assert logged_in.value("document.querySelectorAll('img,main script,iframe').length") == 0
    logged_in.open(f"{served.url}/#/run/{run}")
    text = logged_in.value("document.body.textContent")
    assert all(tag in text for tag in HOSTILE)
    assert logged_in.errors() == []


def test_a_filter_in_the_box_and_in_the_link_gives_the_same_rows(
    logged_in: Browser, served: Served
) -> None:
    logged_in.open(f"{served.url}/#/runs")
    logged_in.value(
        "(box => { box.value = 'train.learning_rate > 2.5e-3';"
        " box.dispatchEvent(new Event('input')); })(document.querySelector('.filter'))"
    )
    logged_in.wait_for("document.querySelectorAll('.rows .row').length === 1")
    link = logged_in.value("location.href")
    logged_in.open(link)
    assert logged_in.value("document.querySelector('.rows .name').textContent") == "third"
    logged_in.open(f"{served.url}/#/runs?filter=los%20%3C")
    assert "the filter ends" in logged_in.value("document.querySelector('.message').textContent")


@pytest.mark.parametrize("width", [1400, 400])
def test_each_view_shows_what_it_promises_without_an_error(
    logged_in: Browser, served: Served, width: int
) -> None:
    ids = served.ids()
    logged_in.open(f"{served.url}/#/runs")  # an earlier view may still ask
    logged_in.events.clear()
    shown = {
        "runs": ["gpt-tiny", "finished"],
        f"run/{ids[0]}": ["predicted 400 ms", "0.95\u00a0×", "Memory by tier", "held-out loss"],
        f"compare?ids={','.join(ids)}&smooth=0.6&logy=1": ["3 runs", "gradient_norm"],
        f"diff?ids={ids[0]},{ids[1]}": ["train.learning_rate", "0.002"],
    }
    for place, texts in shown.items():
        logged_in.open(f"{served.url}/#/{place}", width=width)
        text = logged_in.value("document.body.innerText")
        assert [one for one in texts if one not in text] == []
        wide = logged_in.value("document.documentElement.scrollWidth")
        assert wide <= width, f"{place} is {wide} pixels wide"
    assert logged_in.errors() == []


@pytest.mark.parametrize("width", [1280, 390])
def test_runs_of_a_sweep_are_told_apart(page: Browser, tmp_path: Path, width: int) -> None:
    names = [f"a-sweep-whose-name-is-far-too-long-for-its-column-{n:04}" for n in range(3)]
    for index, name in enumerate(names):
        with make_run(tmp_path, name=name, rate=1e-3 * (index + 1), group="sweep") as run:
            run.end("finished")
    with serve(tmp_path) as served:
        page.open(f"{served.url}/#token={TOKEN}")
        page.open(f"{served.url}/#/runs", width=width)
        text = page.value("document.querySelector('.rows').innerText")
        assert all(name in text and rate in text for name, rate in zip(names, RATES, strict=True))
        # What is left of the name's start leaves room for its end.
        seen = page.value(
            "[...document.querySelectorAll('.rows .name')].map(name => {"
            " const range = document.createRange(); range.selectNodeContents(name.lastChild);"
            " return range.getBoundingClientRect().right <="
            " name.parentElement.getBoundingClientRect().right + 1; })"
        )
        assert seen == [True, True, True]
        page.call("Page.navigate", url="about:blank")


@pytest.mark.parametrize("width", [1280, 400])
def test_a_narrow_table_cuts_neither_its_columns_nor_the_mark_of_a_broken_run(
    page: Browser, tmp_path: Path, width: int
) -> None:
    for index in range(3):
        with make_run(tmp_path, group="rates", rate=1e-3 * (index + 1)) as run:
            run.end("finished")
    with make_run(tmp_path, name="a-long-name-of-a-run-that-diverged") as run:
        run.end("broken")
    annotate(run.path, broken=True, tags=("candidate",))
    with serve(tmp_path) as served:
        page.open(f"{served.url}/#token={TOKEN}")
        page.open(f"{served.url}/#/runs", width=width)
        for one in (".table", ".tag.warn"):
            assert page.value(
                f"(one => one.scrollWidth <= one.clientWidth)(document.querySelector('{one}'))"
            )


def test_points_that_are_logged_appear_in_the_chart(page: Browser, tmp_path: Path) -> None:
    with make_run(tmp_path, steps=5) as run, serve(tmp_path) as served:
        page.open(f"{served.url}/#token={TOKEN}")
        page.open(f"{served.url}/#/run/{run.id}")
        log_steps(run, [6, 7, 8])
        page.wait_for("document.querySelector('.tile .value').textContent === '8'")
        page.call("Page.navigate", url="about:blank")


def test_a_saved_view_opens_without_the_server(
    logged_in: Browser, served: Served, tmp_path: Path
) -> None:
    ids = ",".join(served.ids())
    logged_in.open(f"{served.url}/#/compare?ids={ids}")
    saved = logged_in.value(
        "(() => { const link = document.querySelector('nav a.button');"
        " link.addEventListener('click', event => event.preventDefault()); link.click();"
        " return fetch(link.href).then(answer => answer.text()); })()"
    )
    file = tmp_path / "saved.html"
    file.write_text(saved)
    logged_in.events.clear()
    logged_in.open(file.as_uri())
    assert "3 runs" in logged_in.value("document.body.innerText")
    assert logged_in.value("document.querySelectorAll('canvas').length") == 4
    assert "pwned" not in logged_in.value("document.title")
    assert logged_in.errors() == []


def test_tags_and_the_archive_are_changed_on_the_page(page: Browser, tmp_path: Path) -> None:
    make_record(tmp_path)
    with serve(tmp_path) as served:
        run = served.ids()[0]
        page.open(f"{served.url}/#token={TOKEN}")
        page.open(f"{served.url}/#/run/{run}")
        page.value(
            "(box => { box.value = 'kept'; box.dispatchEvent(new KeyboardEvent('keydown',"
            " {key: 'Enter'})); })(document.querySelector('.tag-entry'))"
        )
        page.wait_for("document.querySelector('.annotations .tag')?.textContent.includes('kept')")
        assert served.ask(f"/api/runs/{run}")["tags"] == ["kept"]
        page.call("Page.navigate", url="about:blank")
