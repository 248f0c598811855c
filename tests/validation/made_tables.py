"""Makes tables of runs, and runs, with good defaults."""

from collections.abc import Mapping
from pathlib import Path

from windlass.validation.csv_table import COLUMNS, read_table
from windlass.validation.published_run import PublishedRun
from windlass.validation.row_to_run import rows_to_runs

GPT = {
    "source": "vTrain", "model": "gpt-3.6B", "layers": "30", "hidden": "3072", "heads": "32",
    "seq": "2048", "vocab": "50257", "global_batch": "512", "microbatch": "4", "t": "2", "p": "1",
    "d": "32", "interleave": "1", "recompute": "full", "sequence_parallel": "no", "zero": "0",
    "device": "A100-SXM4-80GB", "n_devices": "64", "measured_step_s": "4.0",
}  # fmt: skip
"""One row; columns that it leaves out are empty."""

BERT = {
    "source": "mlcommons/training_results_v1.0 Graphcore", "model": "bert-large", "layers": "24",
    "hidden": "1024", "heads": "16", "seq": "512", "vocab": "30400", "global_batch": "3072",
    "microbatch": "2", "t": "1", "p": "4", "d": "4", "device": "Graphcore IPU GC200",
    "n_devices": "16", "measured_step_s": "2.16",
}  # fmt: skip


def write_table(path: Path, *rows: Mapping[str, str], more: tuple[str, ...] = ()) -> Path:
    """A CSV file of these rows under the common columns and `more`."""
    head = (*COLUMNS, *more)
    lines = [",".join(head)]
    lines += [",".join(f'"{row.get(name, "")}"' for name in head) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run_of(folder: Path, base: Mapping[str, str] = GPT, **changes: object) -> PublishedRun:
    """The run that a row tells of."""
    row = {**base, **{name: str(value) for name, value in changes.items()}}
    more = tuple(name for name in row if name not in COLUMNS)
    table = read_table(write_table(folder / "made.csv", row, more=more))
    (found,) = rows_to_runs(table.rows)
    assert isinstance(found, PublishedRun), found
    return found
