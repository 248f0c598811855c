"""Models, losses and data that are objects."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import windlass
from windlass.errors import PlanError, RecordError, RequestError
from windlass.jobs.objects import name_of_model
from windlass.models import build_layer_stack
from windlass.schema import Step

SETTINGS = (
    "train.steps=4", "train.batch=4", "train.save_every=2", "train.sequence=8", "batch.micro=2",
    "precision=float32", "compile=false", "train.evaluate_sequences=2",
)  # fmt: skip
IDS = (torch.arange(600) ** 2) % 17

Train = Callable[..., windlass.Run]


def build() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 17))


def half_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / 2


@pytest.fixture
def train(home: Path) -> Train:
    """Trains with a few small steps."""

    def start(model: object, *overrides: str, **more: object) -> windlass.Run:
        return windlass.train(model, *SETTINGS, *overrides, root=home / "runs", **more)  # type: ignore[arg-type]

    return start


@pytest.fixture(scope="module")
def trained(
    cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[nn.Sequential, windlass.Run]:
    """A module, and the finished run that was given it."""
    torch.manual_seed(0)
    model = build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        run = windlass.train(model, *SETTINGS, data=IDS, root=tmp_path_factory.mktemp("runs"))
        list(run)
    return model, run


def losses(steps: Iterable[Step]) -> list[float]:
    return [step.loss for step in steps]


def test_a_module_that_was_trained_sparse_has_zeros_where_weights_are_absent(train: Train) -> None:
    model = nn.Sequential(nn.Embedding(17, 32), nn.Linear(32, 32), nn.Linear(32, 17))
    before = model[1].weight.detach().clone()
    run = train(
        model, "sparsity.modules=1", "sparsity.pattern=unstructured", "sparsity.level=0.75",
        data=IDS,
    )  # fmt: skip
    list(run)
    weight = model[1].weight.detach()
    assert int((weight != 0).sum()) == 32 * 32 // 4
    assert not torch.equal(weight[weight != 0], before[weight != 0])


def test_a_module_has_its_trained_weights_after_the_last_step(
    trained: tuple[nn.Sequential, windlass.Run],
) -> None:
    model, run = trained
    torch.manual_seed(0)
    untrained = build()

    saved = load_file(run.folder / "checkpoints" / "step-00000004" / "layer-0001.safetensors")
    assert torch.equal(saved["weight/1.weight"], model[1].weight)
    assert not torch.equal(untrained[1].weight, model[1].weight)


def test_a_run_of_objects_resumes_bit_for_bit_if_they_are_given_again(
    train: Train, trained: tuple[nn.Sequential, windlass.Run]
) -> None:
    function = lambda: build()  # noqa: E731, PLW0108  known by no name of a file
    left = train(function, data=IDS)
    first = losses(islice(left, 2))

    with pytest.raises(RecordError, match="was given its model as an object"):
        windlass.resume(left.folder)
    resumed = losses(windlass.resume(left.folder, model=function))

    # A function draws weights from the seed, which is that of the module too.
    assert first + resumed == losses(windlass.load(trained[1].folder).steps)


def test_a_loss_takes_the_place_of_cross_entropy(
    train: Train, trained: tuple[nn.Sequential, windlass.Run]
) -> None:
    halved = losses(islice(train(lambda: build(), loss=half_loss, data=IDS), 1))  # noqa: PLW0108

    assert halved[0] == pytest.approx(windlass.load(trained[1].folder).steps[0].loss / 2)


def test_a_function_of_an_imported_file_is_known_by_its_place() -> None:
    name, by_name = name_of_model(build_layer_stack)

    assert by_name
    assert name.endswith("models/build.py:build_layer_stack")
    assert name_of_model(lambda: None) == ("test_a_function_of_an_imported_file_is_known_by_its_place.locals.lambda", False)  # noqa: E501  # fmt: skip


def test_texts_are_a_source_like_any_other(train: Train) -> None:
    model = nn.Sequential(nn.Embedding(257, 8), nn.Linear(8, 257))

    run = train(model, "data.tokenizer=byte", data=["to be or not to be " * 9] * 8)

    assert len(losses(run)) == 4
    assert "".join(windlass.sample(run.folder, "to", model=model, tokens=2))


@pytest.mark.parametrize(
    ("model", "more", "error", "message"),
    [
        (5, {}, RequestError, "not a `int`"),
        (build, {"data": IDS + 9}, PlanError, "token ids up to 25, and the model has 17"),
        (build, {"data": 7}, RequestError, "data are the name of a source"),
    ],
)
def test_what_is_no_model_or_no_data_for_it_is_refused(
    train: Train, model: object, more: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(model, **({"data": IDS} | more))


def test_objects_run_in_one_process(train: Train) -> None:
    with pytest.raises(PlanError, match="the plan has 2 devices, a process each"):
        train(build(), "parallel.data=2", data=IDS)


def test_objects_are_not_checked_because_a_check_runs_in_other_processes(
    trained: tuple[nn.Sequential, windlass.Run],
) -> None:
    with pytest.raises(RequestError, match="a check compares processes"):
        windlass.check(trained[1].planned)


def test_values_show_themselves_in_a_line_and_escaped_in_a_notebook(
    trained: tuple[nn.Sequential, windlass.Run],
) -> None:
    run = trained[1]
    record = windlass.load(run.folder)
    named = replace(record, request=run.planned.request, graph=None)

    shown = (run, run.planned, run.planned.plan, run.planned.prediction, *record.steps, record)
    for value in (*shown, windlass.runs(root=run.folder.parent), windlass.fit(run.planned)):
        assert "\n" not in repr(value)
        assert len(repr(value)) < 400
        assert "<" in value._repr_html_()  # type: ignore[attr-defined]
    assert repr(run.planned).startswith("<Planned Sequential on here: fits")
    model = named.request.model.model_copy(update={"name": "<script>"})  # type: ignore[union-attr]
    request = named.request.model_copy(update={"model": model})  # type: ignore[union-attr]
    assert "&lt;script&gt;" in replace(named, request=request)._repr_html_()


def test_the_notebook_page_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    page = Path(__file__).parents[2] / "docs" / "guide" / "notebook.md"
    namespace: dict[str, object] = {}

    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, str(page), "exec"), namespace)  # noqa: S102  the page's own code

    assert [run.state for run in windlass.runs()] == ["finished"]


def nano(n_layer: int = 1, vocab_size: int = 17) -> nn.Sequential:
    blocks = (nn.Linear(8, 8) for _ in range(n_layer))
    return nn.Sequential(nn.Embedding(vocab_size, 8), *blocks, nn.Linear(8, vocab_size))


@pytest.mark.usefixtures("home")
def test_arguments_of_a_function_that_is_passed_are_keys() -> None:
    words = ("model.n_layer=3", "model.vocabulary=20", *SETTINGS)
    for function in (nano, partial(nano)):
        planned = windlass.plan(function, *words, data=IDS)
        assert (planned.graph.layers, planned.graph.vocabulary) == (5, 20)
