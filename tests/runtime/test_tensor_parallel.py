"""A tensor-parallel layer computes what the full layer computes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forked_runs import beside_tests

CLOSE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 0.05}
"""Relative tolerance. Partial sums are rounded and added in another order: some hundred roundings
of 1e-16, or of 6e-8; a dozen of 0.004."""

SMALL = {"layers": 1, "width": 32, "heads": 4, "vocabulary": 50, "sequence": 16, "dropout": 0.1}
GROUPED = {**SMALL, "heads": 8, "kv_heads": 4, "ffn": 48}
WIDE = {**SMALL, "width": 128, "heads": 8}
"""Eight block columns of 16, of which two or four ranks have equally many."""
EIGHT_HEADS = {**SMALL, "heads": 8}
EVEN = ("gpt-tiny", "gpt-j-6b", "gpt-neox-20b")
FAMILIES = {"gpt-tiny": SMALL, "gpt-j-6b": SMALL, "gpt-neox-20b": SMALL, "llama-tiny": GROUPED,
            "qwen2.5-0.5b": GROUPED, "qwen3-0.6b": GROUPED, "gemma2-2b": GROUPED,
            "gemma3-1b": GROUPED, "bert-tiny": SMALL}  # fmt: skip
RULES = {
    "0.table": "vocabulary",
    "*.attention": "region",
    "*.attention.mixed": "column in 3 by 4",
    "*.attention.heads": "count",
    "*.attention.out": "row",
    "*.feed": "region",
    "*.feed.0": "column",
    "*.feed.2": "sharded",
    "*.feed.3": "row",
    "*.feed.4": "replicated",
}
MODELS = {
    **{family: {"model": family, "dials": dials} for family, dials in FAMILIES.items()},
    "a user's model": {"model": "own", "sharding_rules": RULES | {"3": "vocabulary"}},
    "bert-tiny with pairs": {"model": "bert-tiny", "dials": {**SMALL, "sentence_head": True}},
    "a user's model with a replicated head": {"model": "own", "sharding_rules": RULES},
}
GRIDS = {name: model for name, model in MODELS.items() if not name.endswith(("head", "with pairs"))}
"""A replicated head needs all features of a token, which no rank of a grid has."""


def cases(degree: int, columns: int, models: dict[str, dict]) -> list[dict]:
    """Every model with a tensor-parallel degree, in float64 and float32."""
    label = f"{degree // columns}x{columns}" if columns > 1 else degree
    return [
        {
            "name": f"{name}, {label} ranks, {dtype}", "degree": degree, "columns": columns,
            "dtype": dtype, **model,
        }
        for name, model in models.items()
        for dtype in ("float64", "float32")
    ]  # fmt: skip


CASES = [
    *cases(4, 1, MODELS), *cases(2, 1, MODELS), *cases(4, 2, GRIDS),
    *cases(4, 4, {"one row": MODELS["llama-tiny"]}),
    *cases(4, 2, {"six heads": {"model": "gpt-tiny", "dials": {**SMALL, "width": 48, "heads": 6}}}),
    {"name": "bfloat16", "degree": 4, "dtype": "bfloat16", **MODELS["llama-tiny"]},
    {
        "name": "bfloat16, 2x2 ranks", "degree": 4, "columns": 2, "dtype": "bfloat16",
        **MODELS["llama-tiny"],
    },
    {
        "name": "compiled", "model": "gpt-j-6b", "dials": SMALL, "degree": 2, "dtype": "float32",
        "compiled": True, "layers": [1, 2],
    },
    {
        "name": "compiled, 2x2 ranks", "model": "gpt-j-6b", "dials": SMALL, "degree": 4,
        "columns": 2, "dtype": "float32", "compiled": True, "layers": [1, 2],
    },
    {
        "name": "adapters, the head's too", "model": "gpt-tiny", "dials": SMALL, "degree": 2,
        "dtype": "float64", "layers": [1, 2],
        "lora": {"rank": 3, "targets": ["block0.*", "projection"], "dropout": 0.2},
    },
    *(
        {
            "name": f"sparse, {pattern}, {degree} ranks", "model": "gpt-tiny", "dials": WIDE,
            "degree": degree, "dtype": "float64", "layers": [1],
            "sparsity": {"level": 0.5, "block": 16, "pattern": pattern},
        }
        for pattern, degree in (("block", 4), ("block", 2), ("2:4", 4), ("unstructured", 2))
    ),
]  # fmt: skip
"""Processes 0 and 1 run the compiled cases of degree 2, processes 2 and 3 the other ones."""
ROUNDED = ("llama-tiny", "a user's model,")
"""Float32 differs from float64 by its roundings only: the default suite has it for two models."""
ALIKE = ("qwen2.5", "gemma2")
"""Each has the modules of a model that the default suite has: of Qwen 3, of Gemma 3."""
QUICK = [
    case for case in CASES
    if (case["dtype"] != "float32" or case["name"].startswith(ROUNDED))
    and not case["name"].startswith(ALIKE)
    and (case["degree"] == 4 or case["name"].startswith((*ROUNDED, "sparse", "adapters")))
]  # fmt: skip
"""What four ranks divide is divided by two in the same way: the default suite has both of few."""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    """Errors on each of four processes, by case and tensor."""
    return errors_by_rank(4, QUICK, tmp_path_factory.mktemp("ranks"))


def errors_by_rank(
    ranks: int, cases: list[dict], folder: Path
) -> list[dict[str, dict[str, float]]]:
    """Errors on each process, by case and tensor."""
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("tensor_parallel_rank.py")
    running = subprocess.Popen(
        [sys.executable, str(script), str(ranks), str(folder)], start_new_session=True,
        env=beside_tests(),
    )  # fmt: skip
    try:
        assert running.wait(timeout=240) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case["name"])
def test_outputs_and_gradients_of_every_rank_are_those_of_the_full_layer(case: dict, errors: list):
    require_close(case, errors)


@pytest.mark.slow
def test_outputs_and_gradients_of_all_models_are_those_of_the_full_layer_in_float32_and_compiled(
    tmp_path: Path,
):
    rest = [case for case in CASES if case not in QUICK]
    errors = errors_by_rank(4, rest, tmp_path)
    for case in rest:
        require_close(case, errors)


@pytest.mark.slow
def test_outputs_and_gradients_are_those_of_the_full_layer_in_grids_of_eight_ranks(tmp_path: Path):
    wide = {
        **{name: model | {"dials": EIGHT_HEADS} for name, model in GRIDS.items() if name in EVEN},
        "4 key heads": MODELS["llama-tiny"],
    }
    grids = [*cases(8, 2, wide), *cases(8, 4, wide)]
    errors = errors_by_rank(8, grids, tmp_path)
    for case in grids:
        require_close(case, errors)


def require_close(case: dict, errors: list[dict[str, dict[str, float]]]) -> None:
    """Requires that all tensors of all ranks are those of the full layer."""
    of_case = [by_case[case["name"]] for by_case in errors if case["name"] in by_case]
    assert len(of_case) == case["degree"]
    for by_tensor in of_case:
        assert len(by_tensor) > 8
        assert {n: x for n, x in by_tensor.items() if not x < CLOSE[case["dtype"]]} == {}
