"""A filter picks exactly the runs that it describes, and no text of a user becomes SQL."""

import math
from collections.abc import Callable, Iterator

import pandas as pd
import pytest
from hypothesis import given, strategies as st
from made_stores import make_run

from windlass.errors import InputErrors, RequestError, WindlassError
from windlass.record.annotations import annotate
from windlass.record.catalog import Catalog
from windlass.record.filters.run_filter import parse_filter
from windlass.record.run_row import RunQuery, RunRow

MODELS = ("gpt-tiny", "gpt2-124m", 'it\'s "odd"')
RUNS = [
    {"model": MODELS[i % 3], "losses": (9.0, 1.0 + i), "seconds": 0.1 * (1 + i % 4),
     "learning_rate": 10.0 ** -(i % 3), "optimizer": ("adamw", "sgd")[i % 2]}
    for i in range(12)
]  # fmt: skip


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    root = tmp_path_factory.mktemp("runs")
    for number, arguments in enumerate(RUNS):
        run = make_run(root, **arguments)
        run.end("finished" if number % 5 else "broken")
        if number % 4 == 0:
            annotate(run.path, tags=["kept", f"n{number}"], note="looks good")
    nothing = make_run(root, losses=(math.nan,))
    nothing.close()
    with Catalog.open(root) as opened:
        opened.refresh()
        yield opened


@pytest.fixture(scope="module")
def frame(catalog: Catalog) -> pd.DataFrame:
    rows = catalog.rows()
    names = ("id", "model", "state", "loss", "seconds", "tags", "notes", "predicted_seconds")
    return pd.DataFrame(
        {name: [getattr(row, name) for row in rows] for name in names}
        | {key: [row.settings.get(key) for row in rows] for key in rows[0].settings}
    )


Frame = pd.DataFrame
CASES: dict[str, Callable[[Frame], "pd.Series[bool]"]] = {
    'model = "gpt-tiny" and loss < 5': lambda f: (f["model"] == "gpt-tiny") & (f["loss"] < 5),
    "model = 'gpt-tiny' or loss >= 10": lambda f: (f["model"] == "gpt-tiny") | (f["loss"] >= 10),
    "not (state = 'broken' or loss > 6)": lambda f: (
        f["loss"].notna() & ~((f["state"] == "broken") | (f["loss"] > 6))
    ),
    "loss < 3 or loss > 9 and state != 'broken'": lambda f: (
        (f["loss"] < 3) | (f["loss"] > 9) & (f["state"] != "broken")
    ),
    "train.learning_rate <= 0.1": lambda f: f["train.learning_rate"] <= 0.1,
    "train.optimizer = 'sgd' AND seconds > 150ms": lambda f: (
        (f["train.optimizer"] == "sgd") & (f["seconds"] > 0.15)
    ),
    "memory_bytes = 1GiB and memory_bytes < 1.1e9": lambda f: f["id"].notna(),
    "model like 'gpt%'": lambda f: f["model"].str.startswith("gpt"),
    "model like 'GPT%'": lambda f: f["id"].isna(),
    "model not like '%-_iny'": lambda f: ~f["model"].str.match(".*-.iny$"),
    "model in ('gpt-tiny', 'it''s \"odd\"')": lambda f: f["model"].isin([MODELS[0], MODELS[2]]),
    "loss not in (2, 3.0, 4e0)": lambda f: f["loss"].notna() & ~f["loss"].isin([2, 3, 4]),
    "tag = 'kept'": lambda f: f["tags"].map(lambda tags: "kept" in tags),
    "tag != 'n4'": lambda f: ~f["tags"].map(lambda tags: "n4" in tags),
    "tag is null and compile = true": lambda f: f["tags"].map(len) == 0,
    "tag is not null or note like '%good%'": lambda f: f["tags"].map(len) > 0,
    "loss is null": lambda f: f["loss"].isna(),
    "ratio > 0.6": lambda f: f["seconds"] / f["predicted_seconds"] > 0.6,
    "max(loss) = 9 and min(loss) < 2.5": lambda f: f["loss"] < 2.5,
    "`seconds.forward` = 0.2 and loss < -1": lambda f: f["id"].isna(),
    "started > '2020-01-01' and ended < '2100-01-01 12:30'": lambda f: f["id"].notna(),
}


@pytest.mark.parametrize("text", CASES)
def test_a_filter_picks_what_pandas_picks(catalog: Catalog, frame: Frame, text: str):
    picked = {row.id for row in catalog.rows(RunQuery(filter=text))}
    assert picked == set(frame["id"][CASES[text](frame)])
    assert catalog.count(RunQuery(filter=text, limit=1)) == len(picked)


def test_rows_are_sorted_with_those_that_lack_the_value_last(catalog: Catalog):
    for sort in ("loss", "loss desc", "max(gradient_norm) DESC", "-train.optimizer", "ratio asc"):
        rows = catalog.rows(RunQuery(sort=sort))
        assert len(rows) == len(RUNS) + 1
        if sort.startswith("loss"):
            losses = [row.loss for row in rows if row.loss is not None]
            assert losses == sorted(losses, reverse=sort == "loss desc")
            assert rows[-1].loss is None
    newest = [row.id for row in catalog.rows()]
    assert newest == sorted(newest, reverse=True)
    page = catalog.rows(RunQuery(limit=3, offset=2))
    assert [row.id for row in page] == newest[2:5]


def test_a_table_has_the_columns_that_are_asked_for(catalog: Catalog):
    names = ("id", "train.optimizer", "train.learning_rate", "compile", "max(loss)", "tags")
    query = RunQuery(filter="tag = 'n4'")
    (values,) = catalog.table(names, query)
    (row,) = catalog.rows(query)
    expected = (row.id, "adamw", 0.1, True, 9.0, ("kept", "n4"))
    assert values == expected
    assert [type(value) for value in values] == [type(value) for value in expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("los < 5", r"no run has `los`: .*; did you mean `loss`\?"),
        ("train.learning_rat = 1", r"did you mean `train.learning_rate`\?"),
        ("los < 5 and modl = 'x'", r"no run has `los`(.|\n)*no run has `modl`"),
        ("loss < 'five'", "`loss` is compared with a number, not with 'five'"),
        ("model < 5", '`model` is a text; write "5" in quotes'),
        ("model = gpt", r'character 9 where a number, `true` or a text in quotes, such as "gpt",'),
        ("loss << 5", r"has `<` at character 7 where a number"),
        ("loss <", r"ends at character 7 where a number, a text in quotes"),
        ("loss 5", r"has `5` at character 6 where one of = != < <= > >=, `in`"),
        ("(loss < 5", r"ends at character 10 where `\)` should stand"),
        ("loss < 5 model = 'x'", r"has `model` at character 10 where `and`, `or` or the end"),
        ("loss < 5; drop table run", r"has `;` at character 9, which begins no name"),
        ("loss like 'x%'", "`loss` is a number, which `like` cannot compare"),
        ("loss < 5GiB", "`loss` is compared with `5GiB`, whose unit it does not have"),
        ("seconds < 5GiB", "write `300ms` or `2min`"),
        ("started < 'yesterday'", "'yesterday' is none; write it as '2026-11-22'"),
        ("state = true", "`state` is neither true nor false"),
        ("tags = 'x'", "`tags` is a list; compare `tag`, `note` or `fault`"),
        ("tag < 'x'", "`tag` is compared with texts, by =, !=, `in` or `like`"),
        ("(" * 3000 + "loss < 5", "more than 40 parentheses"),
        ("not " * 3000 + "loss < 5", "more than 40 `not`"),
        ("loss < 5" + " or loss < 5" * 1000, "more than 400 conditions"),
        ("x" * 30_000, "30000 characters, more than 20000"),
        ("model = '\0'", "is not UTF-8 text, or has a NUL"),
        ("model like 'gpt\\'", "ends with a backslash; double it"),
    ],
    ids=lambda words: words[:40],
)
def test_an_error_says_where_it_is_and_what_was_expected(catalog: Catalog, text: str, message: str):
    with pytest.raises((RequestError, InputErrors), match=message):
        catalog.rows(RunQuery(filter=text))


@pytest.mark.parametrize("sort", ["lss", "tag", 'id"; DROP TABLE run; --', "loss desc desc"])
def test_an_order_by_something_unknown_is_refused(catalog: Catalog, sort: str):
    with pytest.raises(RequestError, match="no run has"):
        catalog.rows(RunQuery(sort=sort))


def test_a_negative_limit_is_refused(catalog: Catalog):
    with pytest.raises(RequestError, match="-1 runs from number 0 on cannot be listed"):
        catalog.rows(RunQuery(limit=-1))


@given(st.text(max_size=60))
def test_any_text_is_a_filter_or_one_of_our_errors(catalog: Catalog, text: str):
    for filter_ in (text, f"model = '{text}'", f"`{text}` < 5", f"loss {text} 5"):
        try:
            found: list[RunRow] = catalog.rows(RunQuery(filter=filter_))
        except WindlassError:
            continue
        assert len(found) <= len(RUNS) + 1


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20))
def test_a_quoted_text_stands_for_itself(text: str):
    for quote in "\"'":
        (value,) = parse_filter(f"model = {quote}{text.replace(quote, quote * 2)}{quote}").values  # type: ignore[union-attr]
        assert value == text
