"""Promises about views that are saved as one file."""

import hashlib
import json
import re
from base64 import b64encode
from html import unescape
from urllib.parse import quote

import pytest
from served_record import HOSTILE, KNOWN, Served

from windlass.server.app import MODULES, static_file


def test_a_saved_view_carries_its_answers_and_fetches_nothing(served: Served) -> None:
    path = "/api/runs?columns=id%2Cname"
    page = saved_page(served, "#/runs", path)
    data = re.search(r'<script type="application/json" id="saved">(.*?)</script>', page, re.DOTALL)
    assert data
    carried = json.loads(data[1])
    assert carried["view"] == "#/runs"
    assert carried["answers"] == {path: served.ask(path)}
    assert not re.search(r'(src|href)="(?!data:)', page.replace(data[0], ""))


def test_only_the_script_of_a_saved_view_runs(served: Served) -> None:
    page = saved_page(served, HOSTILE[1], "/api/runs")
    policy = unescape(re.search(r'Policy" content="([^"]*)"', page)[1])  # type: ignore[index]
    scripts = re.findall(r"<script(?: [^>]*)?>(.*?)</script>", page, re.DOTALL)
    digest = b64encode(hashlib.sha256(scripts[1].encode()).digest()).decode()
    assert len(scripts) == 2
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize(
    "path", ["/api/openapi.json", "/api/sync/runs", "/etc/passwd", "/api/live", "//evil.example/"]
)
def test_only_answers_on_runs_are_saved(served: Served, path: str) -> None:
    status, _, _ = served.send("GET", f"/api/page?path={quote(path, safe='')}", headers=KNOWN)
    assert status == 400


def test_the_modules_of_the_page_join_to_one_script() -> None:
    names: list[str] = []
    seen: set[str] = set()
    for module in MODULES:
        text = static_file(module) or ""
        imported = set(re.findall(r'^import [^;]* from "\./([a-z_]+\.js)";', text, re.MULTILINE))
        assert imported <= seen, f"{module} imports what comes later"
        assert "</script" not in text
        names += re.findall(
            r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", text, re.MULTILINE
        )
        seen.add(module)
    assert len(names) == len(set(names))


def test_no_text_becomes_markup() -> None:
    for module in MODULES:
        text = static_file(module) or ""
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", text)


def saved_page(served: Served, view: str, path: str) -> str:
    query = f"view={quote(view, safe='')}&path={quote(path, safe='')}"
    status, headers, body = served.send("GET", f"/api/page?{query}", headers=KNOWN)
    assert status == 200, body
    assert headers["Content-Disposition"].startswith("attachment")
    return body.decode()
