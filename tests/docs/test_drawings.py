"""The drawings of the docs show what is predicted today."""

import re
from pathlib import Path

import pytest

from command_line import run_here
from made_cache import made_cache

IMAGES = Path(__file__).parents[2] / "docs" / "images"
NEOX = (
    "plan gpt-neox-20b --on dgx-a100-80gb:8 parallel.pipeline=4 parallel.tensor=4 parallel.data=4"
    " sharding.parameters=1 sharding.optimizer=4 offload.optimizer=device parallel.schedule=1f1b"
    " train.batch=128 batch.micro=1 train.sequence=2048 precision=bfloat16 compile=true"
)
DRAWN = {
    "mesh.svg": f"{NEOX} --only mesh",
    "waterfall.svg": f"{NEOX} --only waterfall",
    "memory.svg": f"{NEOX} --only memory",
    "phases.svg": "plan gpt3-6.7b --on a100-40gb phases=8 train.batch=16 train.sequence=1024"
    " batch.micro=16 --only phases",
    "memory-layers.svg": "plan resnet-50 --on dgx-a100-40gb:1 phases=6 parallel.pipeline=1"
    " parallel.data=1 parallel.tensor=1 train.batch=256 batch.micro=64 precision=bfloat16"
    " --only memory-layers",
    "pod256.svg": "plan gpt3-175b --on ipu-pod256 train.batch=128 train.sequence=2048"
    " parallel.pipeline=1 parallel.tensor=8x8 parallel.data=4 sharding.parameters=4"
    " sharding.optimizer=4 --only mesh",
    "compare.svg": "machines compare gpt2-1.5b train.batch=256 --on v100 a100-80gb h100 h200"
    " dgx-v100-32gb dgx-a100-80gb dgx-h100 dgx-h200 cs-2 cs-3 ipu-m2000 sn30",
    "dataflow.svg": "dataflow gpt3-13b --on sn30-rdu --role feed-forward",
}
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
NEAR = 0.05


def texts(svg: str) -> list[str]:
    """What stands in a drawing, and behind its parts."""
    return re.findall(r"<(?:text|title)[^>]*>([^<]*)<", svg)


def numbers(shown: list[str]) -> list[float]:
    return [float(each.replace(",", "")) for text in shown for each in NUMBER.findall(text)]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_of_the_docs_has_the_words_and_numbers_of_its_plan(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    folders = {"XDG_CACHE_HOME": str(made_cache(tmp_path_factory)), "XDG_DATA_HOME": str(tmp_path)}
    option = "--svg" if DRAWN[name].startswith("dataflow") else "--picture"
    words = (*DRAWN[name].split(), option, name)
    done = run_here(words, folders | {"COLUMNS": "200"}, tmp_path)
    assert done.returncode == 0, done.stderr
    kept, drawn = (texts((folder / name).read_text()) for folder in (IMAGES, tmp_path))
    again = f"draw it again: windlass {' '.join(words)}"
    assert [NUMBER.sub("#", text) for text in kept] == [NUMBER.sub("#", t) for t in drawn], again
    assert numbers(kept) == pytest.approx(numbers(drawn), rel=NEAR), again
