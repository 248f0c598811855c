"""One PostgreSQL for a team: sites publish at once, nothing is lost, and it answers as SQLite does.

These tests start a real server. Debian's package `postgresql` has it; nothing needs to run before.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_stores import make_run, make_step

from windlass.cli.main import main
from windlass.errors import RecordError
from windlass.record.annotations import annotate
from windlass.record.catalog import Catalog
from windlass.record.postgres import TeamCatalog
from windlass.record.run_row import RunQuery
from windlass.tracking.run_folder import reopen_run_folder

WRITERS, ROWS = 8, 50_000
FILTERS = (
    None,
    'model = "gpt-tiny" and loss < 5',
    "not (loss >= 3.5) or model like 'gpt2%'",
    "train.learning_rate <= 0.01 and train.optimizer in ('adamw', 'sgd')",
    "max(loss) = 9 and seconds < 300ms",
    "tag = 'kept' or note like '%odd_ \\\\%'",
    "loss is null or compile = true and memory_bytes = 1GiB",
    "started > '2020-01-01' and state != 'running'",
)


def server_folder() -> Path | None:
    """Where `initdb` and `postgres` are."""
    found = [Path(path).parent for path in [shutil.which("initdb")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in found if (folder / "initdb").exists()), None)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        server_folder() is None, reason="no PostgreSQL server; `apt install postgresql` has one"
    ),
]
pytest.importorskip("psycopg", reason="needs psycopg; `pip install 'windlass[postgres]'`")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server that ends with the tests; it listens on a socket in its own folder."""
    programs = server_folder()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    # PostgreSQL refuses to run as root.
    other_user = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
    user = other_user if os.geteuid() == 0 else ()
    if user:
        shutil.chown(folder, "nobody", "nogroup")
    data = folder / "data"
    words = ("-D", str(data), "-U", "team", "-A", "trust", "--no-sync", "-E", "UTF8")
    subprocess.run((*user, programs / "initdb", *words), check=True, capture_output=True)
    options = ("-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}", "-F")
    process = subprocess.Popen(
        (*user, programs / "postgres", "-D", str(data), *options), stderr=subprocess.DEVNULL
    )
    try:
        yield f"postgresql://team@/postgres?host={folder}"
    finally:
        process.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
        process.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def url(server: str) -> str:
    """The same server, without tables."""
    import psycopg

    for _ in range(100):
        with (
            contextlib.suppress(psycopg.OperationalError),
            psycopg.connect(server, autocommit=True) as connection,
        ):
            connection.execute("DROP SCHEMA IF EXISTS windlass CASCADE")
            return server
        time.sleep(0.1)
    raise AssertionError("the server did not start")


WRITER = """
import sys
from pathlib import Path
from made_stores import make_run
from windlass.record.postgres import TeamCatalog

url, root, site, rows = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
with TeamCatalog(url) as team:
    for part in range(5):
        run = make_run(root, losses=(9.0, 2.0 + part), folder=root / f"{site}-{part}")
        for step in range(3, rows // 5 + 1):
            run.journal.append_row(step, {"loss": 1.0 + part})
            if step % 500 == 0:
                team.publish(root, site=site)
        run.end("finished")
        team.publish(root, site=site)
"""


def test_eight_sites_publish_at_once_and_nothing_is_lost(url: str, tmp_path: Path):
    sites = [f"site{number}" for number in range(WRITERS)]
    processes = [
        subprocess.Popen(
            (sys.executable, "-c", WRITER, url, tmp_path / "runs" / site, site,
             str(ROWS // WRITERS)),
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
        for site in sites
    ]  # fmt: skip
    assert [process.wait(timeout=300) for process in processes] == [0] * WRITERS
    merged = tmp_path / "merged"
    for folder in (tmp_path / "runs").glob("*/*"):
        if folder.is_dir():
            shutil.copytree(folder, merged / folder.name)
    with TeamCatalog(url) as team, Catalog.open(merged) as local:
        local.refresh()
        rows = team.rows()
        counts = [team.series(row.id)["loss"].count for row in rows]
        assert len(rows) == 5 * WRITERS
        assert sum(counts) == ROWS
        assert {row.site for row in rows} == set(sites)
        assert [row.id for row in rows] == [row.id for row in local.rows()]


def test_the_team_gets_the_answers_of_the_folder(url: str, tmp_path: Path):
    for number in range(9):
        run = make_run(
            tmp_path, ("gpt-tiny", "gpt2-124m", "it's")[number % 3],
            losses=(9.0, float("nan") if number == 4 else 1.0 + number),
            seconds=0.1 * (1 + number), learning_rate=10.0**-number,
            optimizer=("adamw", "sgd", "lion")[number % 3],
        )  # fmt: skip
        run.end("finished")
        if number % 2:
            annotate(run.path, tags=["kept", "Ünï"], note="an odd- \\ note")
    with Catalog.open(tmp_path) as local, TeamCatalog(url) as team:
        local.refresh()
        assert team.publish(tmp_path, site="here") == 9
        for text in FILTERS:
            for sort in ("id desc", "loss", "loss desc", "train.optimizer", "ratio", "model desc"):
                query = RunQuery(filter=text, sort=sort)
                names = ("id", "model", "loss", "train.learning_rate", "max(loss)", "tags")
                assert team.table(names, query) == local.table(names, query), (text, sort)
                assert team.count(query) == local.count(query)
        for ours, theirs in zip(team.rows(), local.rows(), strict=True):
            assert ours.settings == theirs.settings
            assert (ours.kinds, ours.notes, ours.archived) == (
                theirs.kinds, theirs.notes, theirs.archived,
            )  # fmt: skip
            curves = [one.curves([ours.id], ["loss"])[ours.id]["loss"] for one in (team, local)]
            assert curves[0].high.tobytes() == curves[1].high.tobytes()
            assert curves[0].steps.tobytes() == curves[1].steps.tobytes()
        assert set(team.names()) == set(local.names())
        assert team.tags() == local.tags()


def test_publishing_again_changes_nothing_and_then_only_what_is_new(url: str, tmp_path: Path):
    first, second = make_run(tmp_path), make_run(tmp_path)
    first.end("finished")
    second.end("interrupted")
    with TeamCatalog(url) as team:
        assert team.publish(tmp_path, site="here") == 2
        assert team.publish(tmp_path, site="here") == 0
        annotate(first.path, tags=["kept"])
        assert team.publish(tmp_path, site="here") == 1
        assert [row.id for row in team.rows(RunQuery(filter="tag = 'kept'"))] == [first.id]


@pytest.mark.parametrize("longer_first", [True, False])
def test_of_two_copies_of_a_run_the_longer_one_counts(url: str, tmp_path: Path, longer_first: bool):
    short, long = tmp_path / "a", tmp_path / "b"
    run = make_run(short, folder=short / "run")
    run.end("interrupted")
    shutil.copytree(short, long)
    with reopen_run_folder(long / "run", meta={}) as again:
        again.append_step(make_step(4, 0.25))
        again.end("finished")
    sites = [("long", long), ("short", short)]
    with TeamCatalog(url) as team:
        for site, root in sites if longer_first else reversed(sites):
            team.publish(root, site=site)
        (row,) = team.rows()
        assert (row.step, row.loss, row.state, row.site) == (4, 0.25, "finished", "long")


def test_the_command_line_publishes_and_lists(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make_run(tmp_path).end("finished")
    main(["runs", "publish", url, "--site", "alpha", "--runs", str(tmp_path)])
    assert "published 1 run to `postgresql:/" in capsys.readouterr().out
    main(["runs", "site = 'alpha'", "--columns", "site,loss", "--runs", url])
    assert "alpha" in capsys.readouterr().out
    main(["runs", "site = 'beta'", "--runs", url])
    assert "matches the filter" in capsys.readouterr().out


def test_tables_of_another_version_are_refused(url: str):
    import psycopg

    TeamCatalog(url).close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE windlass.version SET number = 99")
    with pytest.raises(RecordError, match=r"tables of another version of Windlass.*publish again"):
        TeamCatalog(url)


def test_no_message_has_the_password(tmp_path: Path):
    for url in (
        f"postgresql://me:s3cret@localhost/db?host={tmp_path}",
        f"postgresql://me@localhost/db?host={tmp_path}&password=s3cret",
        "postgresql://me:s3cret@localhost:port/db",
        "postgresql://me:s3cret@/db?s3cret=1",
        "postgresql://me:s3cret@[::1/db",
    ):
        with pytest.raises(RecordError) as caught:
            TeamCatalog(url)
        assert "s3cret" not in str(caught.value)
