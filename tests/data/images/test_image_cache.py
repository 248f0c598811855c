"""Images of folders and tables, with their classes."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from windlass.data.examples import ExampleBatches, ExampleDataset, load_examples
from windlass.data.images.image_cache import prepare_images
from windlass.data.pixels import PixelScale
from windlass.errors import DataError, InputErrors
from windlass.schema.data_request import DataRequest

SHAPE = (1, 4, 4)
COUNT = 40


def grey(level: int, size: tuple[int, int] = (4, 4)) -> Image.Image:
    return Image.new("L", size, level)


def folders(root: Path) -> Path:
    """Two classes of images of one grey each: dark ones and bright ones."""
    for index in range(COUNT):
        label = "bright" if index % 2 else "dark"
        path = root / label / f"{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        grey(index + 200 * (index % 2)).save(path)
    return root


def prepared(cache: Path, **keys: object) -> ExampleDataset:
    settings = {"format": "images", "image_shape": SHAPE, "held_out": 0.3, **keys}
    return prepare_images(DataRequest.model_validate(settings), cache=cache)


def test_each_image_of_a_folder_has_the_class_of_its_folder(tmp_path: Path):
    images = prepared(tmp_path / "cache", source=str(folders(tmp_path / "in")))

    assert images.inputs.shape == (COUNT, *SHAPE)
    assert images.vocabulary == 2
    assert 0 < images.held_out < COUNT / 2
    # `bright` comes first by name.
    assert ((images.inputs[:, 0, 0, 0] > 100) == (images.targets == 0)).all()
    assert len(np.unique(images.inputs[:, 0, 0, 0])) == COUNT


def test_a_table_gives_the_same_images_as_a_folder(tmp_path: Path):
    rows = []
    for index in range(COUNT):
        content = io.BytesIO()
        grey(index + 200 * (index % 2)).save(content, "png")
        rows.append({"image": {"bytes": content.getvalue(), "path": None}, "label": index % 2})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "images.parquet")

    images = prepared(tmp_path / "cache", source=str(tmp_path / "images.parquet"))

    assert ((images.inputs[:, 0, 0, 0] > 100) == (images.targets == 1)).all()
    assert sorted(images.inputs[:, 0, 0, 0]) == sorted(i + 200 * (i % 2) for i in range(COUNT))


def test_a_class_number_without_a_name_is_refused_and_not_taken_for_the_last_class(tmp_path: Path):
    names = {"info": {"features": {"label": {"names": ["dark", "bright"], "_type": "ClassLabel"}}}}
    table = pa.table({"image": [b"", b""], "label": [1, -1]})
    table = table.replace_schema_metadata({"huggingface": json.dumps(names)})
    pq.write_table(table, tmp_path / "images.parquet")

    with pytest.raises(DataError, match="row 1 has class -1, and the 2 classes are counted from 0"):
        prepared(tmp_path / "cache", source=str(tmp_path / "images.parquet"))


def test_images_of_another_size_and_colour_are_scaled_to_one_shape(tmp_path: Path):
    root = folders(tmp_path / "in")
    Image.new("RGB", (30, 10), (255, 0, 0)).save(root / "bright" / "red.jpg")

    images = prepared(tmp_path / "cache", source=str(root), image_shape=(3, 4, 4))

    red = images.inputs[(images.inputs[:, 0] > 200).all(axis=(1, 2))]
    assert any((image[1:] < 30).all() for image in red)


def test_numbers_of_the_training_images_have_mean_0_and_deviation_1(tmp_path: Path):
    images = prepared(tmp_path / "cache", source=str(folders(tmp_path / "in")))
    assert images.pixels is not None

    numbers = images.pixels.numbers(images.inputs[: COUNT - images.held_out])

    # Sums of 400 float32 numbers round so far.
    assert abs(numbers.mean()) < 1e-5
    assert abs(numbers.std() - 1) < 1e-5


def test_a_second_request_reads_no_image_again(tmp_path: Path):
    root = folders(tmp_path / "in")
    first = prepared(tmp_path / "cache", source=str(root))
    modified = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*/images.npy")}

    again = prepared(tmp_path / "cache", source=str(root))

    assert again.fingerprint == first.fingerprint
    assert modified == {path: path.stat().st_mtime_ns for path in modified}
    grey(9).save(root / "dark" / "000.png")
    assert prepared(tmp_path / "cache", source=str(root)).fingerprint != first.fingerprint


def test_an_image_is_flipped_and_moved_by_its_key_alone():
    rows = np.arange(16, dtype=np.uint8).reshape(1, 1, 4, 4).repeat(60, axis=0)
    targets = np.zeros(60, dtype=np.int64)
    moving = PixelScale(mean=(0.0,), std=(1 / 255,), flips=True, border=1)
    data = ExampleDataset(inputs=rows, targets=targets, held_out=4, pixels=moving)
    batches = ExampleBatches(data, batch=56, seed=1)

    inputs, _ = batches.samples(1)

    assert np.array_equal(inputs[8:12], batches.samples(1, 8, 4)[0])
    padded = np.pad(rows[0, 0], 1)
    cuts = {
        padded[y : y + 4, x : x + 4][:, ::turn].tobytes()
        for y in range(3) for x in range(3) for turn in (1, -1)
    }  # fmt: skip
    # A flip comes before a move over the border: the same 18 images either way.
    found = {np.rint(image[0]).astype(np.uint8).tobytes() for image in inputs}
    assert found <= cuts
    assert len(found) > 9
    held_out, _ = next(batches.held_out_batches(1))
    assert np.array_equal(np.rint(held_out[0, 0]), rows[0, 0])


def test_saved_images_are_read_again_with_how_they_become_numbers(tmp_path: Path):
    images = prepared(tmp_path / "c", source="digits", image_shape=(1, 8, 8), flips=True, border=2)
    few = images.excerpt(train=6, held_out=3)

    few.save(tmp_path / "examples.safetensors")

    again = load_examples(tmp_path / "examples.safetensors")
    assert again is not None
    assert (again.pixels, again.held_out, len(again.inputs)) == (images.pixels, 3, 9)
    assert again.fingerprint == few.fingerprint


def test_digits_are_those_of_scikit_learn(tmp_path: Path):
    images = prepared(tmp_path, source="digits", image_shape=(1, 8, 8))

    assert (len(images.inputs), images.vocabulary, images.shape) == (1797, 10, (1, 8, 8))
    assert images.inputs.max() == 255


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("flat", r"lie in no folder of their class"),
        ("one", r"has 1 class, and a model learns to tell several"),
        ("missing", r"no images `.*in`"),
        ("text", r"no images in `.*in`"),
        ("held out", r"each needs one; change `data.held_out`"),
    ],
)
def test_a_source_without_classes_of_images_is_refused(tmp_path: Path, damage: str, words: str):
    root = tmp_path / "in"
    held_out = 1e-9 if damage == "held out" else 0.3
    if damage == "flat":
        root.mkdir()
        grey(1).save(root / "1.png")
    elif damage == "one":
        folders(root)
        for path in (root / "dark").iterdir():
            path.unlink()
    elif damage == "text":
        root.mkdir()
        (root / "a.txt").write_text("text")
    elif damage == "held out":
        folders(root)

    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "cache", source=str(root), held_out=held_out)


def test_all_files_that_are_no_images_are_named_at_once(tmp_path: Path):
    root = folders(tmp_path / "in")
    (root / "dark" / "a.png").write_bytes(b"no image")
    (root / "bright" / "b.jpg").write_bytes((root / "dark" / "000.png").read_bytes()[:40])

    with pytest.raises(InputErrors) as error:
        prepared(tmp_path / "cache", source=str(root))

    assert "`dark/a.png`" in str(error.value)
    assert "`bright/b.jpg`" in str(error.value)
    assert not list((tmp_path / "cache").glob("*/meta.json"))
