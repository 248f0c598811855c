"""A small record that a server serves, for the tests that only ask."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser import Browser, browser
from served_record import TOKEN, Served, make_record, serve


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("runs")
    make_record(root)
    with serve(root) as one:
        yield one


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def logged_in(page: Browser, served: Served) -> Browser:
    page.open(f"{served.url}/#token={TOKEN}")
    return page
