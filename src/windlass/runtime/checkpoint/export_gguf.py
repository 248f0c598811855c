"""Weights of a checkpoint as one GGUF file, for llama.cpp and its kin.

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Written by the
package `gguf`, an extra.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.atomic_files import atomic_path, require_output_file
from windlass.errors import RequestError
from windlass.models import GgufLayout, GgufVocabulary, LayerStack
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.checkpoint.export_weights import dense_tensors


def export_gguf(
    checkpoint: Checkpoint,
    stack: LayerStack,
    layout: GgufLayout,
    vocabulary: GgufVocabulary | None,
    to: Path,
) -> None:
    """Writes a GGUF file; one parameter at a time is in memory.

    Args:
        to: the file, which is replaced.

    Raises:
        RequestError: the package `gguf` is not installed.
        CheckpointError: the checkpoint is damaged or belongs to another model.
        ModelError: a weight is too large for the type that it is written in.
    """
    try:
        import gguf
    except ImportError:
        raise RequestError(
            "GGUF files are written by the package `gguf`, which is not installed; install it by "
            "`pip install 'windlass[gguf]'`"
        ) from None
    require_output_file(to)
    with atomic_path(to, clears=True) as temporary:
        writer = gguf.GGUFWriter(temporary, layout.architecture)
        try:
            _add_keys(writer, layout)
            _add_vocabulary(writer, vocabulary)
            with torch.device("meta"):
                for name, shape in _tensors(stack, layout, None):
                    _add_shape(writer, gguf, name, shape)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for _, value in _tensors(stack, layout, checkpoint):
                writer.write_tensor_data(_array(value))
        finally:
            writer.close()


def _add_keys(writer: Any, layout: GgufLayout) -> None:  # noqa: ANN401  an optional package's
    writer.add_name(layout.name)
    for key, value in layout.keys.items():
        add = {float: writer.add_float32, str: writer.add_string}.get(type(value))
        (add or writer.add_uint32)(key, value)


def _add_vocabulary(writer: Any, vocabulary: GgufVocabulary | None) -> None:  # noqa: ANN401
    if vocabulary is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.words)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    for key, value in vocabulary.settings.items():
        getattr(writer, f"add_{key}")(value)


def _add_shape(writer: Any, gguf: Any, name: str, shape: Tensor) -> None:  # noqa: ANN401
    """Announces a tensor."""
    kinds = {
        torch.float32: gguf.GGMLQuantizationType.F32,
        torch.float16: gguf.GGMLQuantizationType.F16,
        torch.bfloat16: gguf.GGMLQuantizationType.BF16,
    }
    typed = shape.dtype if shape.dtype in kinds else torch.float32
    nbytes = shape.numel() * typed.itemsize
    # With any other type than bytes, the shape is that of the elements.
    writer.add_tensor_info(
        name, tuple(shape.shape), np.dtype(np.float32), nbytes, raw_dtype=kinds[typed]
    )


def _tensors(
    stack: LayerStack, layout: GgufLayout, checkpoint: Checkpoint | None
) -> Iterator[tuple[str, Tensor]]:
    """All tensors in their order; shapes and types alone without a checkpoint."""
    for index in range(len(stack.layers)):
        for parameter, value in dense_tensors(stack, index, checkpoint):
            yield from layout.tensors(parameter, value)
    yield from layout.constants()


def _array(value: Tensor) -> Any:  # noqa: ANN401  of numpy
    """The bytes of a tensor as an array."""
    if value.dtype == torch.float64:
        value = value.float()
    return value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
