"""The names that tensors have for PEFT, where a model runs by the code of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from windlass.models.config import TransformerConfig
from windlass.models.huggingface.families import find_family
from windlass.models.huggingface.model_folder import find_model_folder, is_huggingface
from windlass.models.huggingface.tensor_layouts import TensorNames
from windlass.models.huggingface.write_config import config_content
from windlass.models.layer_stack import LayerStack
from windlass.models.transformers_models.build_model import build_pretrained, model_of_content


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """Names of a module whose parameters are those of Hugging Face, as `TensorNames` gives them."""

    stack: LayerStack

    def module_name(self, tensor: str) -> str:
        """What a tensor is called among the modules."""
        return tensor

    def tensor_name(self, module: str) -> str:
        """The inverse of `module_name`."""
        return module

    def name_in_request(self, parameter: str) -> str:
        """The name by which a request means a parameter."""
        return self.stack.name_in_module(parameter)

    def name_in_layer(self, linear: str) -> str:
        """A linear layer's name within its block."""
        layer = self.stack.names[self.stack.layer_of(linear)]
        return linear.removeprefix(f"{layer}.")

    def is_transposed(self, _parameter: str) -> bool:
        """Whether a weight stands there with its inputs as rows."""
        return False

    def half(self, _parameter: str) -> Literal["first", "second"] | None:
        """None: each parameter is a tensor."""
        return None

    def sources(self, parameter: str) -> tuple[str, ...]:
        """The tensor that a parameter is."""
        return (self.stack.name_in_module(parameter),)

    def join(self, _parameter: str, tensors: Sequence[Tensor]) -> Tensor:
        """The parameter of its one tensor."""
        return tensors[0]

    def order_rows(self, _parameter: str, value: Tensor) -> Tensor:
        """The same rows."""
        return value

    def split(self, parameter: str, value: Tensor) -> tuple[tuple[str, Tensor], ...]:
        """The tensor of a parameter with its values."""
        return ((self.stack.name_in_module(parameter), value.contiguous()),)

    split_rows = split


def adapter_names(
    config: TransformerConfig | None, stack: LayerStack
) -> tuple[TensorNames | ModuleNames, str]:
    """The names that the tensors of a model have for PEFT, and that of the model.

    Args:
        config: the model's configuration; None if it runs by the code of transformers.
        stack: the model.

    Raises:
        ModelError: no type of Hugging Face has this shape.
    """
    if config is None:
        return ModuleNames(stack=stack), str(find_model_folder(stack.name).config.parent)
    if is_huggingface(config.name):
        folder = find_model_folder(config.name)
        family = find_family(folder.read_config().get("model_type"))
        return TensorNames(family=family, config=config), str(folder.config.parent)
    return TensorNames(family=config_content(config)[0], config=config), config.name


def adapter_base(config: TransformerConfig | None, stack: LayerStack) -> Any:  # noqa: ANN401
    """The model of transformers beside which PEFT has the adapters, on the meta device."""
    if config is None:
        return build_pretrained(stack.name)
    if not is_huggingface(config.name):
        return model_of_content(config_content(config)[1], config.name)
    folder = find_model_folder(config.name)
    content = folder.read_config()
    family = find_family(content.get("model_type"))
    content["architectures"] = [family.architecture_of(config)]
    classes = config.text_classes if config.image is None else config.vocabulary
    if classes is not None:
        content = {k: v for k, v in content.items() if k not in ("id2label", "label2id")}
        content["num_labels"] = classes
    return model_of_content(content, str(folder.config))
