"""Objects that a caller passes in place of names: a model, a loss, and data."""

import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from windlass.atomic_files import cache_folder, scratch_folder
from windlass.errors import DataError, ModelError, RequestError
from windlass.models import (
    PROCESSOR_FILE,
    ModelArgument,
    find_model_folder,
    image_processor,
    is_causal,
    is_huggingface,
    tokenizer_file,
)
from windlass.schema import (
    BYTE_ENTRIES,
    DataRequest,
    ExampleShape,
    Graph,
    ModelIdentity,
    ModelRequest,
    Request,
    ResolvedRequest,
    is_users_own,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from windlass.data import ExampleDataset
    from windlass.models import LayerStack
    from windlass.runtime import Checkpoint

IN_MEMORY = "memory"
"""The source of data that were passed as tensors."""
R = TypeVar("R", bound=Request)
_IMAGE_SHAPE = ("channels", "height", "width")
_DIGITS = "digits"
"""The images that a model of images is trained on by default."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedObjects:
    """What a plan was made for and no file holds. It is used in this process alone."""

    model: "nn.Module | Callable[..., nn.Module] | None" = None
    """None builds the model that the request names."""
    loss: "Callable[[Tensor, Tensor], Tensor] | None" = None
    """None means cross-entropy."""
    examples: "ExampleDataset | None" = None
    """None means the text that the request names."""

    @property
    def names(self) -> list[str]:
        """Those of `model` and `loss` that are objects of this process."""
        return [name for name in ("model", "loss") if getattr(self, name) is not None]

    @property
    def is_rebuildable(self) -> bool:
        """Whether another process can build the model from the request alone."""
        return not self.names

    def stack(
        self, request: ModelIdentity, *, seed: int | None, weightless: bool = False
    ) -> "LayerStack":
        """The layers, with weights; an `nn.Module` is copied, and stays as it is.

        Args:
            seed: the run's seed; None needs no weights.
            weightless: whether weights of a Hugging Face folder are left alone, because a
                checkpoint has newer ones.

        Raises:
            ModelError: the function fails, or its result is no sequence of layers.
        """
        from windlass.models import build_layer_stack, layer_stack_of, set_layer_loss

        arguments = model_arguments(request)
        if self.model is not None:
            stack = layer_stack_of(
                deepcopy(self.model) if _is_module(self.model) else self.model,
                request.name,
                arguments,
                device="meta" if seed is None else "cpu",
                seed=seed or 0,
                sharding_rules=request.sharding_rules,
                sparsity=request.sparsity,
                lora=request.lora,
                frozen=request.frozen,
            )
        else:
            device = "cpu" if seed is not None and is_users_own(request.name) else "meta"
            stack = build_layer_stack(
                request.name, arguments, device=device, seed=seed or 0,
                sharding_rules=request.sharding_rules, sparsity=request.sparsity,
                weightless=weightless or seed is None,
                lora=request.lora, frozen=request.frozen,
            )  # fmt: skip
        if self.loss is not None:
            set_layer_loss(stack.layers[-1], _function(self.loss))
        return stack


def model_arguments(request: ModelRequest) -> dict[str, ModelArgument]:
    """What a request says of a model beside its name and its sharding."""
    return {key: value for key, value in request.dials.items() if key != "sharding_rules"}


NO_OBJECTS = PlannedObjects()
"""A model that its name builds, its usual loss, and text."""


def take_trained_weights(
    objects: PlannedObjects, checkpoint: "Checkpoint", identity: ModelIdentity
) -> None:
    """Gives a module that was passed the weights of a checkpoint; does nothing without a module.

    A module stays dense: weights that are absent in the checkpoint become zeros.

    Raises:
        CheckpointError: the module is not the one that was trained.
    """
    if not _is_module(objects.model):
        return
    from windlass.models import layer_stack_of
    from windlass.runtime import evaluation_checkpoint, load_dense_weights, load_weights

    arguments = model_arguments(identity)
    dense = layer_stack_of(cast("nn.Module", objects.model), "", arguments, device="cpu", seed=0)
    with scratch_folder(checkpoint.path.parent) as folder:
        evaluated = evaluation_checkpoint(checkpoint, dense, folder / "merged")
        if identity.sparsity is None:
            load_weights(evaluated, dense)
        else:
            load_dense_weights(evaluated, objects.stack(identity, seed=0), dense)


def name_of_model(model: object) -> tuple[str, bool]:
    """The name under which runs list a model, and whether other processes can build it from that.

    They can if it is a function at the top of a file that is imported, not run as a script.

    Raises:
        RequestError: it is neither a module nor a function.
    """
    if _is_module(model):
        return type(model).__name__, False
    if not callable(model):
        raise RequestError(
            f"a model is a name, an `nn.Sequential` or a function that returns one, not a "
            f"`{type(model).__name__}`"
        )
    name = getattr(model, "__qualname__", type(model).__name__)
    module = sys.modules.get(getattr(model, "__module__", ""))
    file = getattr(module, "__file__", None)
    is_script = module is None or module.__name__ == "__main__"
    if file and not is_script and getattr(module, name, None) is model:
        return f"{file}:{name}", True
    return name.replace("<", "").replace(">", ""), False


def argument_override(override: str) -> str:
    """An override for a function that was passed: `model.n_layer=4` sets its argument `n_layer`."""
    table, _, rest = override.partition(".")
    key = rest.partition("=")[0].strip()
    is_argument = table.strip() == "model" and key and key not in ModelRequest.model_fields
    is_argument = is_argument and "." not in key
    return f"model.arguments.{rest.lstrip()}" if is_argument else override


def with_examples(
    objects: PlannedObjects, data: Iterable[object], request: ResolvedRequest, graph: Graph
) -> PlannedObjects:
    """The objects with examples made of data.

    Args:
        request: says how many are needed, and how many are held out.

    Raises:
        DataError: the data are too few, or of another form.
        RequestError: the examples have another length than `train.sequence`.
    """
    from windlass.data import make_examples

    train, held_out = request.train, request.data.held_out
    sequence, most = train.sequence, None
    if not hasattr(data, "__len__"):  # it may have no end: as many as the run takes
        most = ceil(train.steps * train.batch / (1 - held_out)) + train.evaluate_sequences
    examples = make_examples(data, sequence=sequence, held_out=held_out, most=most)
    if graph.examples is None and examples.sequence not in (None, sequence):
        raise RequestError(
            f"the pairs have {examples.sequence} tokens, and `train.sequence` is {sequence}; leave "
            "`train.sequence` out"
        )
    return replace(objects, examples=examples)


def _is_module(model: object) -> bool:
    """Whether a value is an `nn.Module`; answers without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _function(loss: "Callable[[Tensor, Tensor], Tensor]") -> "Callable[[Tensor, Tensor], Tensor]":
    """The loss as a function: a module would become a part of the layer that it is attached to."""

    def call(logits: "Tensor", targets: "Tensor") -> "Tensor":
        return loss(logits, targets)

    return call


def require_cross_entropy(request: Request, objects: PlannedObjects) -> None:
    """Refuses a z-loss beside a loss without a softmax.

    Raises:
        RequestError: the loss is the user's own, or that of numbers.
    """
    factor = request.train.z_loss
    loss = "is your own" if objects.loss is not None else None
    if request.model.predicts == "numbers":
        loss = "is the squared error of numbers"
    if factor is not None and loss is not None:
        raise RequestError(
            f"`train.z_loss` = {factor:g} belongs to cross-entropy, and the loss of "
            f"`{request.model.name}` {loss}; leave it out"
        )


def with_own_data(request: R, graph: Graph) -> R:
    """The request with data that its model can take, as far as it leaves them open.

    A Hugging Face model has a tokenizer of its own, and one that is trained has no more entries
    than its model. A model of images is trained on images of its shape, by default scikit-learn's
    digits, and one of Hugging Face on pixels as it knows them.

    Raises:
        RequestError: a model of images is asked to take text.
        ModelError: a file beside a Hugging Face model cannot be read, or is of other images.
    """
    name, data = request.model.name, request.data
    if graph.examples is not None:
        return request.model_copy(update={"data": _with_own_images(name, data, graph.examples)})
    file = own_tokenizer(name)
    own: dict[str, object] = {}
    if file is not None and "tokenizer" not in data.model_fields_set:
        own = {"tokenizer": str(file)}
    elif "vocabulary" not in data.model_fields_set and is_causal(name):
        entries = max(BYTE_ENTRIES, min(graph.vocabulary, data.vocabulary))
        most = data.vocabulary if data.tokenizer == "bpe" else BYTE_ENTRIES + 1
        own = {"vocabulary": entries} if entries < most else {}
    if data.format == "chat" and data.chat_date is None:
        own |= _today_if_told(str(own.get("tokenizer", data.tokenizer)), data.chat_template)
    return request.model_copy(update={"data": data.model_copy(update=own)}) if own else request


def own_tokenizer(name: str) -> Path | None:
    """The `tokenizer.json` of a model of Hugging Face, as it has it or as transformers makes it.

    Returns:
        None if it has none.

    Raises:
        ModelError: there is no such model.
        DataError: its tokenizer cannot be read.
    """
    from windlass.data import converted_tokenizer

    if not is_huggingface(name):
        return None
    folder = find_model_folder(name).config.parent
    return tokenizer_file(name) or converted_tokenizer(folder, cache_folder() / "tokenizers")


def _today_if_told(tokenizer: str, template: str | None) -> dict[str, object]:
    """The day that a chat template tells, if it asks for one: a resumed run tells the same."""
    from windlass.data import chat_template_source, tells_date

    try:
        _, source = chat_template_source(tokenizer, template)
    except DataError:  # whoever reads the data says so
        return {}
    return (
        {"chat_date": datetime.now().astimezone().date().isoformat()} if tells_date(source) else {}
    )


def _with_own_images(name: str, data: DataRequest, examples: ExampleShape) -> DataRequest:
    """The request for images of a model's shape."""
    if data.source == IN_MEMORY or len(examples.inputs) != len(_IMAGE_SHAPE):
        return data
    given = data.model_fields_set
    if "format" in given and data.format != "images":
        raise RequestError(
            f"`data.format` = {data.format}, and the model takes images; leave it out, or set "
            "`data.format=images`"
        )
    own: dict[str, object] = {"format": "images"}
    if "source" not in given:
        own["source"] = _DIGITS
    if data.image_shape is None:
        own["image_shape"] = examples.inputs
    if data.image_mean is None and data.image_std is None:
        own |= _own_pixels(name, examples.inputs[0])
    return DataRequest.model_validate(data.model_dump(include=given) | own)


def _own_pixels(name: str, channels: int) -> dict[str, object]:
    """Mean and deviation of the pixels that a Hugging Face model knows; none of other models."""
    processor = image_processor(name) if is_huggingface(name) else None
    if processor is None or not processor.mean:
        return {}
    if len(processor.mean) != channels:
        raise ModelError(
            f"`{PROCESSOR_FILE}` beside `{name}` has {len(processor.mean)} numbers as "
            f"`image_mean`, and the model takes images of {channels} channels; set "
            "`data.image_mean` and `data.image_std`"
        )
    return {"image_mean": processor.mean, "image_std": processor.std}
