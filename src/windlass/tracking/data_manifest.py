"""The data of a run by content: hashes of tokens, tokenizer, split and documents."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from windlass.schema import DataManifest, DataSplit

if TYPE_CHECKING:
    from windlass.data import ExampleDataset, SplitMeta, TokenDataset


def make_data_manifest(
    data: "TokenDataset | ExampleDataset", sources: Sequence[str] = ()
) -> DataManifest:
    """What a run is trained on and evaluated with.

    Args:
        data: the data, whose own files hold most of the hashes.
        sources: the sources as the request names them.
    """
    from windlass.data import ExampleDataset

    if isinstance(data, ExampleDataset):
        return _of_examples(data)
    meta, files = data.meta, data.meta.files
    return DataManifest(
        kind="text",
        sources=tuple(sources),
        tokenizer_sha256=files["tokenizer.json"].sha256,
        vocabulary=data.vocabulary,
        train=_of_text(data, "train", meta.train),
        held_out=_of_text(data, "held_out", meta.held_out),
    )


def _of_text(data: "TokenDataset", split: str, meta: "SplitMeta") -> DataSplit:
    from windlass.data import document_files

    hashes = (data.meta.files[name].sha256 for name in document_files(split))
    return DataSplit(
        tokens=meta.tokens,
        documents=meta.documents,
        tokens_sha256=meta.sha256,
        documents_sha256=hashlib.sha256(" ".join(hashes).encode()).hexdigest(),
    )


def _of_examples(data: "ExampleDataset") -> DataManifest:
    first_held_out = len(data.inputs) - data.held_out
    splits = [
        DataSplit(
            tokens=data.inputs[part].size,
            documents=len(data.inputs[part]),
            tokens_sha256=hashlib.sha256(
                data.inputs[part].tobytes() + data.targets[part].tobytes()
            ).hexdigest(),
        )
        for part in (slice(first_held_out), slice(first_held_out, None))
    ]
    return DataManifest(
        kind="examples", vocabulary=data.vocabulary, train=splits[0], held_out=splits[1]
    )
