"""Rows of tables become runs, or give their reason."""

from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path

import pytest

from validation.made_tables import BERT, GPT, run_of, write_table
from windlass.errors import InputErrors, RequestError
from windlass.program import rank_kinds
from windlass.validation.csv_table import COLUMNS, read_table
from windlass.validation.predict_run import predict_run
from windlass.validation.published_plan import published_plan
from windlass.validation.published_run import PublishedRun
from windlass.validation.row_to_run import SkippedRow, rows_to_runs


def _reason(folder: Path, **changes: object) -> str:
    row = {**GPT, **{name: str(value) for name, value in changes.items()}}
    (found,) = rows_to_runs(read_table(write_table(folder / "made.csv", row)).rows)
    assert isinstance(found, SkippedRow), found
    return found.reason


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device": "TPUv4"}, "'TPUv4' is not known"),
        ({"hidden": ""}, "`hidden` not published"),
        ({"seq": "many"}, "`seq` = 'many' is not a number"),
        ({"t": "-8"}, "`t` = '-8' is not a number from 0 to 1e+18"),
        ({"t": "4"}, "t x p x d = 128, but `n_devices` = 64"),
        ({"model": "efficientnet-b4"}, "other than ResNet-50"),
        ({"measured_step_s": ""}, "no step time, throughput or peak memory"),
        ({"global_batch": "0"}, "`global_batch` = '0' is not a number of 1 or more"),
    ],
)
def test_a_row_that_cannot_become_a_run_gives_its_reason(
    tmp_path: Path, changes: dict[str, str], told: str
):
    assert told in _reason(tmp_path, **changes)


def test_the_stack_depends_on_a_rows_content_and_not_on_the_files_name(tmp_path: Path):
    def stack(base: Mapping[str, str] = GPT, **changes: str) -> str:
        return run_of(tmp_path, base, **changes).cluster.stack

    assert stack() == "megatron-deepspeed"
    assert stack(source="Korthikanti et al. 2022") == "megatron-core"
    assert stack(source="a llm-foundry table", zero="3 (FSDP)") == "fsdp"
    assert stack(BERT) == "popart"
    assert stack(BERT, source="www.graphcore.cn/performance-results") == "poptorch"
    assert stack(source="our own") == "nemo", "an unknown stack counts as a modern one"


def test_layers_follow_from_parameters_and_stages(tmp_path: Path):
    found = run_of(
        tmp_path, layers="", params="194e9", hidden=14400, vocab="~250k (BLOOM)", t=8, p=6, d=8,
        n_devices=384,
    )  # fmt: skip

    assert found.shape.layers == 78
    assert "78 layers computed" in found.assumptions[0]


def test_a_throughput_stands_in_for_a_step_time(tmp_path: Path):
    found = run_of(
        tmp_path, measured_step_s="", measured_throughput=2048, throughput_unit="tokens/s/GPU"
    )

    assert found.step_seconds == pytest.approx(512 * 2048 / (2048 * 64))


def test_torchtitan_splits_a_batch_into_as_many_micro_batches_as_stages(tmp_path: Path):
    whole = {"t": 1, "p": 8, "d": 8, "microbatch": 64, "zero": "3"}
    titan = run_of(tmp_path, source="pytorch/torchtitan", **whole)
    other = run_of(tmp_path, **whole)

    assert (titan.config.micro, titan.config.accumulation, titan.candidates) == (8.0, 8.0, ())
    assert len(other.candidates) > 1


def test_runs_before_a_software_update_are_recognized_by_their_date(tmp_path: Path):
    early, late = (
        run_of(tmp_path, source="bigscience", notes=f"{day} 2022") for day in ("02-21", "02-26")
    )

    assert (early.config.old_software, late.config.old_software) == (1.0, 0.0)
    assert run_of(tmp_path, notes="02-21 2022").config.old_software == 0.0


def test_hosts_of_four_are_recognized_by_the_systems_name(tmp_path: Path):
    mlperf = {**GPT, "source": "mlcommons/training_results_v2.0", "model": "bert-large"}
    runs = [
        run_of(tmp_path, {**mlperf, "system": name}, t=1, d=8, n_devices=8)
        for name in ("2xXE8545x4A100-SXM-40GB", "XE8545x4A100-SXM-40GB", "dgxa100_ngc22.04_pytorch")
    ]
    far, *near = (one.step_seconds for one in map(predict_run, runs))

    assert [run.per_host for run in runs] == [4.0, None, None]
    assert near[0] == near[1] < far


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace(",", ";"), "separate cells by commas, not by semicolons"),
        (lambda text: text.replace(",", "\t"), "separate cells by commas, not by tabs"),
        (lambda text: text.replace("notes", "model"), "`model` appears twice"),
    ],
)
def test_a_header_of_another_form_is_refused_with_what_is_wrong_in_it(
    tmp_path: Path, change: Callable[[str], str], told: str
):
    path = write_table(tmp_path / "odd.csv", GPT)
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")

    with pytest.raises(RequestError, match=told):
        read_table(path)


def test_headers_in_capitals_and_rows_of_empty_cells_do_no_harm(tmp_path: Path):
    path = write_table(tmp_path / "made.csv", GPT)
    head, row = path.read_text(encoding="utf-8").splitlines()
    path.write_text(f"{head.upper()}\n{row}\n,,,\n", encoding="utf-8-sig")

    (found,) = read_table(path).rows

    assert found.text("model") == GPT["model"]


def test_a_file_that_is_no_table_of_runs_is_refused_with_its_columns(tmp_path: Path):
    path = tmp_path / "other.csv"
    path.write_text("model,device,measured_step\ngpt,a100,1\n", encoding="utf-8")

    with pytest.raises(RequestError, match="did you mean `measured_step`"):
        read_table(path)


def test_all_lines_of_the_wrong_length_are_reported_at_once(tmp_path: Path):
    path = write_table(tmp_path / "short.csv", GPT)
    with path.open("a", encoding="utf-8") as file:
        file.write("only,three,cells\n" * 2)

    with pytest.raises(InputErrors) as caught:
        read_table(path)

    assert len(caught.value.messages) == 2
    assert ":3: 3 cells" in caught.value.messages[0]
    assert ":4: 3 cells" in caught.value.messages[1]


def test_filled_columns_that_no_prediction_reads_are_named(tmp_path: Path):
    run = run_of(tmp_path, colour="blue", framework="Megatron-LM 0.14")

    assert run.unread == ("colour", "framework")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not a table of runs"),
        ("model\ngr\u00f6\u00dfe".encode("latin-1"), ":2: the text is not UTF-8"),
        (b"model,device,measured_step_s\n", "has a header and no rows"),
        (b'model,device,measured_step_s\na,b,1\n"a,b,1\n', ":3: not a line of a CSV table"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_place_and_the_way_out(
    tmp_path: Path, content: bytes, told: str
):
    path = tmp_path / "odd.csv"
    path.write_bytes(content)

    with pytest.raises(RequestError, match=told):
        read_table(path)


def test_a_folder_is_no_table(tmp_path: Path):
    with pytest.raises(RequestError, match="is a folder; name the tables in it"):
        read_table(tmp_path)


def test_with_very_many_lines_of_the_wrong_length_the_first_are_named_and_all_counted(
    tmp_path: Path,
):
    path = write_table(tmp_path / "long.csv", GPT)
    with path.open("a", encoding="utf-8") as file:
        file.write("only,three,cells\n" * 1000)

    with pytest.raises(InputErrors) as caught:
        read_table(path)

    *named, rest = caught.value.messages
    assert len(named) < 100
    assert f"{1000 - len(named)} more such lines" in rest


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_may_end_as_on_any_system(tmp_path: Path, end: str):
    path = write_table(tmp_path / "made.csv", GPT, GPT)
    path.write_bytes(path.read_bytes().replace(b"\n", end.encode()))

    assert [row.cells for row in read_table(path).rows] == [
        row.cells for row in read_table(write_table(tmp_path / "plain.csv", GPT, GPT)).rows
    ]


@pytest.mark.parametrize("column", ["layers", "vocab", "hidden", "interleave", "measured_step_s"])
@pytest.mark.parametrize("cell", ["9" * 400, "-1x", "1e400"])
def test_a_cell_that_is_not_a_number_is_never_predicted_as_one(
    tmp_path: Path, column: str, cell: str
):
    table = read_table(write_table(tmp_path / "made.csv", {**GPT, column: cell}))
    (found,) = rows_to_runs(table.rows)

    if isinstance(found, PublishedRun):  # a cell of words says nothing, or begins with a number
        assert isfinite(predict_run(found).step_seconds)
    else:
        assert f"`{column}`" in found.reason
        assert len(found.reason) < 100


EVERYTHING = {
    **GPT, "grad_accum": "4", "precision": "bf16", "context_parallel": "1", "ffn": "12288",
    "kv_heads": "32", "params": "3.6e9", "peak_memory_gib": "40", "outcome": "ok",
    "experts": "", "expert_parallel": "1", "experts_per_token": "", "expert_ffn": "",
    "shared_ffn": "", "dense_layers": "0", "head_dim": "96", "attention": "mha", "lora_rank": "",
    "framework": "Megatron-LM", "system": "64xDGX", "sdk": "1.0",
}  # fmt: skip
"""A row with all columns that say what ran."""


def _told(row: PublishedRun | SkippedRow) -> object:
    """What a user reads of a row, apart from its prediction."""
    return row.reason if isinstance(row, SkippedRow) else (row.assumptions, row.unread)


@pytest.mark.parametrize("column", [name for name in EVERYTHING if name not in ("source", "model")])
@pytest.mark.parametrize("nonsense", ["purple", "7 moons"])
def test_nonsense_in_any_cell_changes_what_is_said_or_predicted(
    tmp_path: Path, column: str, nonsense: str
):
    more = tuple(name for name in EVERYTHING if name not in COLUMNS)
    rows = EVERYTHING, {**EVERYTHING, column: nonsense}
    sane, odd = rows_to_runs(read_table(write_table(tmp_path / "a.csv", *rows, more=more)).rows)

    assert isinstance(sane, PublishedRun)
    if isinstance(odd, PublishedRun) and _told(odd) == _told(sane):
        is_named = column in odd.unread
        assert is_named or (odd.shape, odd.config, odd.per_host) != (
            sane.shape, sane.config, sane.per_host
        )  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"precision": "mxfp4"}, "'mxfp4' is no precision that stacks are priced in"),
        ({"precision": "fp32"}, "'fp32' is no precision"),
        ({"precision": "bf16 fp8"}, "'bf16 fp8' is no precision"),
        ({"experts": "8"}, "`experts_per_token`, `expert_ffn` not published"),
        (
            {"experts": "8", "experts_per_token": "2", "expert_ffn": "96", "params": ""},
            "a mixture of experts (`experts` = '8'), whose costs under `megatron-deepspeed`",
        ),
        ({"expert_parallel": "4"}, "`expert_parallel` = '4', but `experts` is not published"),
        ({"attention": "linear"}, "`attention` = 'linear' is computed by no stack's graph"),
        ({"attention": "gqa", "kv_heads": ""}, "`kv_heads` not published"),
        ({"lora_rank": "16"}, "adapters (`lora_rank` = '16'), whose costs under"),
        ({"zero": "3 + CPU/NVMe offload"}, "no stack's costs have its offload"),
        ({"grad_accum": "2"}, "are 8 each, but `microbatch` = 4"),
        ({"params": "46.7e9"}, "as of another model"),
    ],
)
def test_a_run_that_no_stack_computes_is_refused_by_the_name_of_what_it_has(
    tmp_path: Path, cells: Mapping[str, str], reason: str
):
    more = tuple(name for name in EVERYTHING if name not in COLUMNS)
    row = {**EVERYTHING, **cells}
    (skipped,) = rows_to_runs(read_table(write_table(tmp_path / "a.csv", row, more=more)).rows)

    assert isinstance(skipped, SkippedRow)
    assert reason in skipped.reason


@pytest.mark.parametrize(
    ("cells", "assumption"),
    [
        ({"precision": "mxfp8"}, "mxfp8 priced as fp8 with a scale for each tensor"),
        ({"attention": "mla"}, "latent attention of the widths of DeepSeek-V3 assumed"),
        ({"head_dim": "128"}, "billion parameters, and `params` says"),
        ({"precision": ""}, "a 16-bit precision assumed"),
        (
            {"ffn": "", "vocab": "250000", "params": "4.93e9"},
            "a head of its own, by its parameters",
        ),
        ({"params": "4.2e9"}, "the shape has 4.84 billion parameters, and `params` says 4.2"),
    ],
)
def test_what_a_prediction_assumes_is_said(
    tmp_path: Path, cells: Mapping[str, str], assumption: str
):
    run = run_of(tmp_path, EVERYTHING, **cells)

    assert any(assumption in each for each in run.assumptions)


def test_a_stated_inner_width_has_a_gate_only_if_the_parameters_say_so(tmp_path: Path):
    plain = run_of(tmp_path, EVERYTHING)
    gated = run_of(tmp_path, EVERYTHING, params="4.7e9")

    assert (plain.shape.ffn_matrices, gated.shape.ffn_matrices) == (2, 3)
    assert "no gate in the feed-forward network, by its parameters" in plain.assumptions


DEEPSEEK_V3 = {
    "source": "Megatron-Bridge", "model": "deepseek-v3", "params": "671026404352", "layers": "61",
    "hidden": "7168", "heads": "128", "kv_heads": "128", "seq": "4096", "vocab": "129280",
    "ffn": "18432", "attention": "mla", "experts": "256", "experts_per_token": "8",
    "expert_ffn": "2048", "shared_ffn": "2048", "dense_layers": "3", "expert_parallel": "64",
    "global_batch": "8192", "microbatch": "1", "t": "2", "p": "8", "d": "64", "interleave": "4",
    "sequence_parallel": "yes", "recompute": "selective", "zero": "1", "precision": "fp8",
    "device": "H100-SXM5-80GB", "n_devices": "1024", "measured_step_s": "25.3",
}  # fmt: skip
"""DeepSeek-V3 as Megatron-Bridge trains it. Source of `params`: the published checkpoint, without
the block that predicts a token further."""
NORMS = 1e-3
"""Share of the parameters in norms and biases, which a shape does not count."""


def _deepseek(folder: Path, **cells: str) -> PublishedRun:
    row = {**DEEPSEEK_V3, **cells}
    more = tuple(name for name in row if name not in COLUMNS)
    (run,) = rows_to_runs(read_table(write_table(folder / "a.csv", row, more=more)).rows)
    assert isinstance(run, PublishedRun), run
    return run


def test_a_shape_with_experts_and_latent_attention_has_the_published_parameters(tmp_path: Path):
    run = _deepseek(tmp_path)

    assert run.shape.parameters == pytest.approx(float(DEEPSEEK_V3["params"]), rel=NORMS)
    assert run.assumptions == ("latent attention of the widths of DeepSeek-V3 assumed",)
    graph = published_plan(run, run.config).graph
    assert graph.parameter_count == pytest.approx(run.shape.parameters, rel=NORMS)


def test_experts_are_divided_over_tensor_parallel_ranks_before_replicas(tmp_path: Path):
    run = _deepseek(tmp_path)

    plan, graph = (published := published_plan(run, run.config)).plan, published.graph
    assert plan.parallel.expert == 32
    shapes = {each.name: each.shape for each in rank_kinds(plan, graph)["block1"].parameters}
    assert shapes["experts.narrow.weight"] == (256 // 64, 7168, 2048)
    assert shapes["shared.narrow.weight"] == (7168, 2048 // 2)


def test_an_expert_parallel_degree_that_divides_no_experts_refuses_the_row(tmp_path: Path):
    row = {**DEEPSEEK_V3, "expert_parallel": "48"}
    more = tuple(name for name in row if name not in COLUMNS)
    (skipped,) = rows_to_runs(read_table(write_table(tmp_path / "a.csv", row, more=more)).rows)

    assert isinstance(skipped, SkippedRow)
    assert "`expert_parallel` = 48 does not divide the 64 replicas" in skipped.reason


def test_four_bits_are_faster_than_eight_where_a_device_has_them(tmp_path: Path):
    eight, four = (
        predict_run(_deepseek(tmp_path, device="B200-SXM-180GB", precision=word)).step_seconds
        for word in ("fp8", "nvfp4")
    )
    assert four < eight


def test_exchanges_of_8_bit_runs_overlap_where_the_software_has_it_and_those_of_4_bits_do_not(
    tmp_path: Path,
):
    cells = {"source": "Megatron-Bridge (26.08 NeMo container)", "device": "B200-SXM-180GB"}
    published = [
        published_plan(run, run.config)
        for run in (_deepseek(tmp_path, **cells, precision=word) for word in ("mxfp8", "nvfp4"))
    ]
    overlaps = [each.machine.stack and each.machine.stack.tensor_overlap for each in published]
    assert overlaps == [0.7, 0.0]
    assert all(each.plan.step_graph for each in published)
