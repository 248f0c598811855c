"""Do the loops of GEMM, GELU and GEMM miss a cache as often as `windlass dataflow` predicts?

`dataflow_traffic.cpp` runs the feed-forward branch op by op, with a fused GELU, and as one section.
Valgrind's cachegrind counts its data misses of a last-level cache of 4 MiB, 64 bytes each; the
report predicts the same branch for a device with 4 MiB on its chip. It takes about a minute:

    python benchmarks/dataflow_traffic.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import windlass
from results import append_row
from windlass.schema import DataflowReport

CACHE = 4 * 2**20
TOKENS, WIDTH, FFN = 2048, 256, 1024
SHARES = {0.0: 1, 0.5: 2, 0.875: 8}
"""Sparsity, and in how many blocks one is kept."""
LINE = 64


def main() -> None:
    """Prints a line and appends a row for each sparsity and degree of fusion."""
    with tempfile.TemporaryDirectory() as folder:
        report = predicted(Path(folder))
        binary = Path(folder) / "traffic"
        source = Path(__file__).with_suffix(".cpp")
        flags = ("-O3", "-mavx2", "-mfma", "-std=c++17")
        subprocess.run(("c++", *flags, str(source), "-o", str(binary)), check=True)
        for level in report.curve:
            counted = misses(binary, level.fusion, SHARES[level.sparsity]) * LINE
            ratio = counted / level.far_bytes
            sys.stdout.write(
                f"{level.sparsity:5.3f} {level.fusion:16} predicted {level.far_bytes / 1e6:6.2f} "
                f"MB, counted {counted / 1e6:6.2f} MB, {ratio:.3f}\n"
            )
            append_row(
                "dataflow_traffic", tokens=TOKENS, width=WIDTH, ffn=FFN, cache_bytes=CACHE,
                sparsity=level.sparsity, fusion=level.fusion,
                predicted_bytes=round(level.far_bytes), counted_bytes=counted,
                ratio=f"{ratio:.4f}",
            )  # fmt: skip


def predicted(folder: Path) -> DataflowReport:
    """The report on a block of these sizes, on a device with so much memory on its chip."""
    machine = windlass.find_machine("a100-80gb")
    device = machine.device.model_copy(update={"on_chip_bytes": CACHE})
    machine.model_copy(update={"device": device}).save(folder / "cache.toml")
    dials = (f"model.width={WIDTH}", f"model.ffn={FFN}", "model.heads=4")
    sizes = (f"model.sequence={TOKENS}", f"train.sequence={TOKENS}", "precision=float32")
    request = windlass.make_request("gpt-tiny", *dials, *sizes)
    (report,) = windlass.dataflow(
        request, on=(str(folder / "cache.toml"),), role="feed-forward", sparsity=tuple(SHARES)
    )
    return report


def misses(binary: Path, mode: str, parts: int) -> int:
    """Data misses of the last-level cache in the counted functions, reads and writes."""
    out = binary.with_suffix(".out")
    subprocess.run(
        (
            "valgrind", "--tool=cachegrind", "--cache-sim=yes", f"--LL={CACHE},16,{LINE}",
            f"--cachegrind-out-file={out}", str(binary), mode, str(TOKENS), str(WIDTH), str(FFN),
            str(parts),
        ),
        check=True, capture_output=True,
    )  # fmt: skip
    total, inside, columns = 0, False, []
    for line in out.read_text().splitlines():
        if line.startswith("events:"):
            events = line.split()[1:]
            columns = [1 + events.index(name) for name in ("DLmr", "DLmw")]
        elif line.startswith("fn="):
            inside = line.startswith("fn=counted_")
        elif inside and line[0].isdigit():
            total += sum(int(line.split()[column]) for column in columns)
    return total


if __name__ == "__main__":
    main()
