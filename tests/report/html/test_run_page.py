"""The page is one well-formed file that fetches nothing and leaves nothing out."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from report.made_runs import on_busy_machine, on_two_stages, with_offload
from windlass.report.html.run_page import run_page
from windlass.schema import run_record as files
from windlass.tracking import RunRecord

SECTIONS = (
    "Loss", "Gradient norm and learning rate", "Step time", "Where the time goes", "Memory",
    "One step, instruction by instruction", "Plan", "Environment", "Files",
)  # fmt: skip
VOID = {"meta", "link", "br", "img"}


class Checker(HTMLParser):
    """Checks that tags nest, and collects everything that could fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.heads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "srcset")]
        self.fetched += [f"{tag}"] if tag in ("link", "iframe", "object", "embed") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.heads.append(data)


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(svg)  # noqa: S314  our own drawing
    return checker


def test_the_page_is_well_formed_and_has_every_section(record: Callable[..., RunRecord]):
    checker = checked(run_page(record()))
    assert [head for head in checker.heads if head in SECTIONS] == list(SECTIONS)


def test_a_sample_of_the_model_is_shown_as_text_and_never_as_markup(
    record: Callable[..., RunRecord],
):
    made = record(count=3)
    assert ">Sample<" not in run_page(made)
    page = run_page(replace(made, sample="<script>x</script>\x00 if a < b:\n\tpass"))
    checked(page)
    assert "&lt;script&gt;x&lt;/script&gt;\ufffd if a &lt; b:\n\tpass" in page


def test_a_run_on_a_busy_machine_says_so_and_marks_what_is_outside_the_interval(
    record: Callable[..., RunRecord],
):
    idle = record(count=20)
    page = run_page(on_busy_machine(idle))
    checked(page)
    assert "The step time is outside its predicted 80 % interval" in page
    assert "the machine was busy: threads waited 38 % of the time" in page
    assert page.count('class="tile outside"') == 3  # step time, speed and MFU
    assert 'class="tile outside"' not in run_page(idle)


def test_a_run_that_takes_more_memory_than_predicted_says_so(record: Callable[..., RunRecord]):
    made = record(count=20)
    peak = made.prediction.peaks[0].peak_bytes if made.prediction else 0
    steps = tuple(replace(step, memory_bytes=round(1.49 * peak)) for step in made.steps)
    page = run_page(replace(made, steps=steps, current_plan_steps=steps))
    assert re.search(r"[Mm]emory at the peak is 1\.49 × its prediction, \d+ MiB more", page)
    assert page.count('class="tile outside"') == 1
    assert "its prediction" not in run_page(made)


def test_the_page_fetches_nothing(record: Callable[..., RunRecord]):
    html = run_page(record())
    assert checked(html).fetched == []
    addresses = set(re.findall(r"https?://[^\s\"'<]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}, "only the name of SVG itself"
    assert "url(#" in html
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest", html)


def test_predicted_and_measured_numbers_are_shown_together(record: Callable[..., RunRecord]):
    html = run_page(record())
    assert "predicted 645 ms, 1.06&#160;×" in html
    assert "measured peak 537 MiB" in html
    assert "unigram entropy 6.31" in html
    assert "bits per byte" in html


def test_text_from_outside_is_escaped(record: Callable[..., RunRecord]):
    html = run_page(record(count=3, name="<script>alert(1)</script>"))
    checked(html)
    assert "<script>alert(1)" not in html
    assert "&lt;1.0 &amp; 2.0&gt;" in html


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_run_of_few_steps_is_drawn(record: Callable[..., RunRecord], count: int):
    checked(run_page(record(count=count)))


def test_the_page_of_a_broken_run_states_what_went_wrong(record: Callable[..., RunRecord]):
    html = run_page(record(count=20, broken_at=9, state="broken"))
    checked(html)
    assert "What went wrong" in html
    assert "the loss is nan at step 9" in html


ALL = (
    files.REQUEST_FILE, files.PLAN_FILE, files.GRAPH_FILE, files.MACHINE_FILE,
    files.PREDICTION_FILE, files.ENVIRONMENT_FILE, files.PREDICTED_TIMELINE_FILE,
    files.MEASURED_TIMELINE_FILE,
)  # fmt: skip


@pytest.mark.parametrize("without", [(file,) for file in ALL] + [ALL])
def test_a_run_without_some_files_is_drawn(
    record: Callable[..., RunRecord], without: tuple[str, ...]
):
    checker = checked(run_page(record(count=30, without=without)))
    assert [head for head in checker.heads if head in SECTIONS] == list(SECTIONS)


def test_the_page_of_ten_thousand_steps_stays_small(record: Callable[..., RunRecord]):
    assert len(run_page(record(count=10_000))) < 400_000


def test_a_run_with_offload_has_tiles_of_predicted_and_measured_traffic(
    record: Callable[..., RunRecord],
):
    text = run_page(with_offload(record(count=5)))
    for name, value in (("read", "2.02 GiB"), ("written", "1.01 GiB")):
        (tile,) = re.findall(rf'<div class="name">{name} a step</div>.*?</div></div>', text)
        assert value in tile
        assert "predicted" in tile


def test_the_page_of_a_run_on_several_ranks_shows_how_each_spends_a_step(
    record: Callable[..., RunRecord],
):
    text = run_page(on_two_stages(record(count=20)))
    assert "<h2>Ranks</h2>" in text
    for words in ("stage 0", "stage 1", "waiting 100 ms", "2.00 GiB"):
        assert words in text
    assert "<title>rank 1: stage 1</title>" in text  # a cell of its device mesh
    assert "<h2>Ranks</h2>" not in run_page(record(count=20, name="single"))
