"""Promises about what the page shows while things change, come late or fail, in a real browser."""

from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from served_record import TOKEN, Served, log_steps, make_record, make_run, serve

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium (Debian: `apt-get install chromium`)"
)


@pytest.mark.parametrize("place", ["run/%", "constructor", "run/none", "compare?ids=none"])
def test_an_address_that_leads_nowhere_leaves_a_page_that_goes_on(
    logged_in: Browser, served: Served, place: str
) -> None:
    logged_in.open(f"{served.url}/#/{place}")
    logged_in.events.clear()
    logged_in.value("location.hash = '#/runs'")
    logged_in.wait_for("document.querySelectorAll('.rows .row').length === 3")
    assert logged_in.errors() == []


def test_a_run_that_has_done_no_step_gets_its_charts_when_it_does(
    page: Browser, tmp_path: Path
) -> None:
    with make_run(tmp_path, steps=0) as run, serve(tmp_path) as served:
        page.open(f"{served.url}/#token={TOKEN}")
        page.open(f"{served.url}/#/run/{run.id}")
        assert page.value("document.querySelectorAll('.plot canvas').length") == 1  # its timeline
        log_steps(run, range(1, 30))
        page.wait_for("document.querySelectorAll('.plot canvas').length >= 4")
        page.call("Page.navigate", url="about:blank")


def test_a_series_that_is_added_is_followed_too(page: Browser, tmp_path: Path) -> None:
    with make_run(tmp_path, steps=5) as run, serve(tmp_path) as served:
        page.open(f"{served.url}/#token={TOKEN}")
        page.open(f"{served.url}/#/run/{run.id}?names=loss")
        page.value(
            "(Old => { window.EventSource = class extends Old {"
            " constructor(url) { super(url); window.followed = decodeURIComponent(url); } }; })"
            "(window.EventSource), null"
        )
        add_series(page, "gradient_norm")
        page.wait_for("window.followed?.includes('names=loss,gradient_norm')")
        page.call("Page.navigate", url="about:blank")


def test_a_view_with_an_added_series_is_saved_whole(
    logged_in: Browser, served: Served, tmp_path: Path
) -> None:
    logged_in.open(f"{served.url}/#/run/{served.ids()[0]}?names=loss")
    add_series(logged_in, "gradient_norm")
    logged_in.wait_for("document.querySelectorAll('.plot canvas').length === 3")
    saved = logged_in.value(
        "(() => { const link = document.querySelector('nav a.button');"
        " link.addEventListener('click', event => event.preventDefault()); link.click();"
        " return fetch(link.href).then(answer => answer.text()); })()"
    )
    (tmp_path / "saved.html").write_text(saved)
    logged_in.events.clear()
    logged_in.open((tmp_path / "saved.html").as_uri())
    assert logged_in.value("document.querySelectorAll('.plot canvas').length") == 3
    assert logged_in.value("document.querySelectorAll('.message.fault').length") == 0
    assert logged_in.errors() == []


def test_a_saved_table_has_the_answer_to_its_own_filter_alone(
    logged_in: Browser, served: Served
) -> None:
    logged_in.open(f"{served.url}/#/runs")
    logged_in.value(typed("train.learning_rate > 2.5e-3"))
    logged_in.wait_for("document.querySelectorAll('.rows .row').length === 1")
    logged_in.value(
        "(link => { link.addEventListener('click', event => event.preventDefault());"
        " link.click(); })(document.querySelector('nav a.button'))"
    )
    paths = logged_in.value(
        "new URL(document.querySelector('nav a.button').href).searchParams.getAll('path')"
    )
    assert len(paths) == 1
    assert "filter=" in paths[0]


def test_a_late_answer_to_an_earlier_filter_is_dropped(logged_in: Browser, served: Served) -> None:
    logged_in.open(f"{served.url}/#/runs")
    logged_in.value(slow("filter=state", 1500))
    logged_in.value(typed('state = "none"'))
    logged_in.wait_for("window.late > 0")
    logged_in.value(typed(""))
    logged_in.wait_for("window.late === 0")
    assert logged_in.value("document.querySelectorAll('.rows .row').length") == 3


def test_a_filter_that_is_left_in_haste_changes_no_other_view(
    logged_in: Browser, served: Served
) -> None:
    place = f"#/run/{served.ids()[0]}"
    logged_in.open(f"{served.url}/#/runs")
    logged_in.value(f"{typed('loss < 3')}; location.hash = '{place}'")
    logged_in.value("new Promise(done => setTimeout(done, 500))")
    assert logged_in.value("location.hash") == place


def test_a_part_that_fails_says_so_and_leaves_the_others(
    logged_in: Browser, served: Served
) -> None:
    logged_in.open(f"{served.url}/#/runs")
    logged_in.value(
        "(ask => { window.fetch = (place, options) => String(place).includes('/timeline')"
        " ? Promise.reject(new Error('gone')) : ask(place, options); })(window.fetch)"
    )
    logged_in.value(f"location.hash = '#/run/{served.ids()[0]}'")
    logged_in.wait_for("document.querySelectorAll('.input').length > 0")
    logged_in.wait_for("document.querySelectorAll('[role=alert]').length === 1")
    assert "does not answer" in logged_in.value("document.querySelector('[role=alert]').innerText")
    assert logged_in.value("document.querySelectorAll('.charts canvas').length") == 4


def test_what_has_the_focus_keeps_it_while_runs_go_on(page: Browser, tmp_path: Path) -> None:
    make_record(tmp_path)
    with make_run(tmp_path, steps=5, name="live") as run, serve(tmp_path) as served:
        page.open(f"{served.url}/#token={TOKEN}")
        page.value("[...document.querySelectorAll('.rows .row input')][0].focus()")
        old = page.value("(window.other = document.querySelectorAll('.rows .row')[1]).innerText")
        log_steps(run, [6, 7, 8])
        page.wait_for("document.querySelector('.rows .c-step').innerText.startsWith('8')")
        assert page.value("document.activeElement.ariaLabel") == "choose live"
        assert page.value("document.querySelectorAll('.rows .row')[1] === window.other"), old
        page.call("Page.navigate", url="about:blank")


def test_a_note_that_is_typed_stays_while_a_tag_is_added(page: Browser, tmp_path: Path) -> None:
    make_record(tmp_path)
    with serve(tmp_path) as served:
        page.open(f"{served.url}/#token={TOKEN}")
        page.open(f"{served.url}/#/run/{served.ids()[0]}")
        page.value("document.querySelector('.note-entry').value = 'half a thought'")
        page.value(
            "(box => { box.value = 'kept'; box.dispatchEvent(new KeyboardEvent('keydown',"
            " {key: 'Enter'})); })(document.querySelector('.tag-entry'))"
        )
        page.wait_for("document.querySelector('.annotations .tag')?.textContent.includes('kept')")
        assert page.value("document.querySelector('.note-entry').value") == "half a thought"
        page.call("Page.navigate", url="about:blank")


def test_a_page_says_that_it_has_lost_its_server_and_hears_of_the_next_one(
    page: Browser, tmp_path: Path
) -> None:
    with make_run(tmp_path, steps=5) as run:
        with serve(tmp_path) as served:
            page.open(f"{served.url}/#token={TOKEN}")
            port = served.port
        log_steps(run, [6, 7])
        page.wait_for("document.querySelector('nav').innerText.includes('not connected')")
        with serve(tmp_path, port=port):
            page.wait_for("document.querySelector('.rows .c-step').innerText.startsWith('7')")
            page.wait_for("!document.querySelector('nav').innerText.includes('not connected')")
            page.call("Page.navigate", url="about:blank")


def test_a_timeline_is_zoomed_and_moved_by_keys(logged_in: Browser, served: Served) -> None:
    logged_in.open(f"{served.url}/#/run/{served.ids()[0]}")
    pictures = []
    for key in ("Home", "+", "ArrowRight", "Home"):
        logged_in.value(
            "document.querySelector('canvas.lanes').dispatchEvent(new KeyboardEvent('keydown',"
            f" {{key: '{key}', bubbles: true, cancelable: true}}))"
        )
        pictures.append(logged_in.value("document.querySelector('canvas.lanes').toDataURL()"))
    assert len(set(pictures)) == 3
    assert pictures[0] == pictures[3]


def add_series(page: Browser, name: str) -> None:
    """Adds a series as somebody does who types its name."""
    page.value(
        f"(box => {{ box.value = '{name}'; box.dispatchEvent(new Event('change')); }})"
        "(document.querySelector('[list=series-names]'))"
    )


def typed(text: str) -> str:
    """An expression that types a filter."""
    return (
        f"(box => {{ box.value = {text!r}; box.dispatchEvent(new Event('input')); }})"
        "(document.querySelector('.filter'))"
    )


def slow(part: str, milliseconds: int) -> str:
    """An expression that lets answers to places with a part come late; `late` counts them."""
    return (
        "(ask => { window.late = 0; window.fetch = async (place, options) => {"
        f" if (!decodeURIComponent(place).includes({part!r})) return ask(place, options);"
        " window.late += 1; const answer = await ask(place, options);"
        f" await new Promise(done => setTimeout(done, {milliseconds}));"
        " setTimeout(() => { window.late -= 1; }, 200); return answer; }; })(window.fetch)"
    )
