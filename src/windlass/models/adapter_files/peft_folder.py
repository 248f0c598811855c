"""A folder of PEFT: its configuration, and the factors of its adapters.

Source: peft 0.21, `LoraConfig` and `get_peft_model_state_dict`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from re import (
    compile as compile_pattern,
    error as PatternError,  # noqa: N812  it is a class
    fullmatch,
)
from typing import Any

from torch import Tensor

from windlass.document import read_json_object
from windlass.errors import InputErrors, ModelError, shorten
from windlass.models.adapter_files.module_names import ModuleNames
from windlass.models.adapter_files.stacked_experts import (
    FACTORS,
    PEFT_PREFIX,
    ExpertFactor,
    split_stacked,
)
from windlass.models.huggingface.model_folder import ADAPTER_CONFIG, is_peft_folder
from windlass.models.huggingface.tensor_layouts import TensorNames
from windlass.models.huggingface.weight_files import StoredTensor, list_file, read_tensor

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_READ = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "target_parameters", "task_type", "use_rslora",
})  # fmt: skip
"""Keys of a configuration that are read, or that change nothing of a trained adapter."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to draw an adapter that leave the weights of the base as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftFolder:
    """The adapters of a folder, whose tensors are read when they are asked for."""

    path: Path
    config: Mapping[str, Any]
    """Content of `adapter_config.json`; `Any` because it is not validated."""
    stored: Mapping[str, StoredTensor | ExpertFactor]
    """Every tensor by its name; one of all experts stands for a factor of each."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors in the file, by those that they have here where these differ."""

    @property
    def base(self) -> str | None:
        """The base that the adapters were trained beside, as the folder names it."""
        base = self.config.get("base_model_name_or_path")
        return base if isinstance(base, str) and base else None

    def factor(self, module: str, which: int) -> StoredTensor | ExpertFactor | None:
        """Where A (0) or B (1) of a module stands; None if it has no adapter."""
        return self.stored.get(f"{PEFT_PREFIX}{module}{FACTORS[which]}")

    def read(self, module: str, which: int) -> Tensor:
        """The values of A (0) or B (1) of a module.

        Raises:
            ModelError: it has no adapter, or the file cannot be read any more.
        """
        factor = self.factor(module, which)
        if factor is None:
            raise ModelError(f"`{self.path}` has no adapter of `{module}` any more")
        if isinstance(factor, ExpertFactor):
            return factor.read()
        name = f"{PEFT_PREFIX}{module}{FACTORS[which]}"
        return read_tensor(self.written.get(name, name), factor)

    def whole(self, tensor: str) -> StoredTensor | None:
        """Where a tensor of the base stands that was trained whole; None if it was not."""
        stored = self.stored.get(f"{PEFT_PREFIX}{tensor}")
        return stored if isinstance(stored, StoredTensor) else None

    def read_whole(self, tensor: str) -> Tensor:
        """The values of a tensor of the base that was trained whole.

        Raises:
            ModelError: there is none, or the file cannot be read any more.
        """
        stored = self.whole(tensor)
        if stored is None:
            raise ModelError(f"`{self.path}` has no `{tensor}` any more")
        name = f"{PEFT_PREFIX}{tensor}"
        return read_tensor(self.written.get(name, name), stored)

    def with_names_of_tensors(self, names: TensorNames | ModuleNames) -> "PeftFolder":
        """The folder, whose tensors are called as those in a folder of the base are."""
        written = {names.tensor_name(name): name for name in self.stored}
        stored = {name: self.stored[own] for name, own in written.items()}
        return replace(self, stored=stored, written=written)

    def with_factors_of_experts(
        self, experts: Mapping[str, Sequence[tuple[str, int]]], routers: Iterable[str]
    ) -> "PeftFolder":
        """The folder, with a factor for each expert of those that stand together.

        Args:
            experts: by full name of our layers of experts, each expert's module and its outputs.
            routers: modules that are routers.
        """
        modules = {name: tuple(module for module, _ in each) for name, each in experts.items()}
        targets = self.config.get("target_parameters")
        # A folder that was read from a file has tensors alone.
        stored = {n: t for n, t in self.stored.items() if isinstance(t, StoredTensor)}
        return replace(self, stored=split_stacked(stored, modules, routers, targets))

    def rank(self, module: str) -> int:
        """The rank of a module's adapter; 0 if it has none."""
        a = self.factor(module, 0)
        return a.shape[0] if a is not None and len(a.shape) == 2 else 0

    def scale(self, module: str) -> float:
        """What the output of a module's adapter is multiplied with."""
        alpha, rank, factor = self.config["lora_alpha"], self.rank(module), self.factor(module, 0)
        tensor = f"{PEFT_PREFIX}{module}{FACTORS[0]}"
        written = self.written.get(tensor, tensor)
        name = written.removeprefix(PEFT_PREFIX).removesuffix(FACTORS[0])
        name = factor.parameter if isinstance(factor, ExpertFactor) else name
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            if fullmatch(rf"(.*\.)?({pattern})", name):
                alpha = value
                break
        return float(alpha / (sqrt(rank) if self.config.get("use_rslora") else rank))


def open_peft_folder(path: Path) -> PeftFolder:
    """The adapters of a folder of PEFT.

    Raises:
        ModelError: it is none, or its file cannot be read.
        InputErrors: everything that makes an adapter more than two factors beside a product.
    """
    if not is_peft_folder(path):
        raise ModelError(
            f"`{shorten(str(path))}` has no `{ADAPTER_CONFIG}`, which every adapter of PEFT has"
        )
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"`{path}` has no `{ADAPTER_WEIGHTS}`; adapters are read from safetensors alone, so "
            "save them again by `model.save_pretrained(NEW)`"
        )
    config = read_json_object(path / ADAPTER_CONFIG, ModelError)
    if errors := [*_misfits(path, config)]:
        raise InputErrors(errors)
    return PeftFolder(path=path, config=config, stored=list_file(path / ADAPTER_WEIGHTS))


def _misfits(path: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """What a configuration asks for that our adapters do not compute."""
    file = path / ADAPTER_CONFIG
    kind = str(config.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        yield f"`{file}` has `peft_type` = {shorten(kind)}; only LORA is read"
        return
    for key, value in config.items():
        # Every way to be more than a pair of factors has a key that is empty without it.
        if key not in _READ and value:
            yield f"`{file}` has `{key}`, with which an adapter may be no pair of factors alone"
    if (bias := config.get("bias", "none")) != "none":
        yield f"`{file}` has `bias` = {shorten(str(bias))}; biases are not trained beside adapters"
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        yield (
            f"`{file}` has `init_lora_weights` = {shorten(str(start))}, which changes the weights "
            "of the base; convert it to a plain adapter with PEFT"
        )
    alpha, dropout = config.get("lora_alpha"), config.get("lora_dropout", 0.0)
    if not isinstance(alpha, int | float) or not alpha > 0:
        yield f"`{file}` has `lora_alpha` = {alpha!r}, which is no number above 0"
    if not _are_scales(config.get("alpha_pattern") or {}):
        yield f"`{file}` has an `alpha_pattern` that is no table of patterns and numbers above 0"
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        yield f"`{file}` has `lora_dropout` = {dropout!r}, which is no number from 0 to 1"


def _are_scales(table: object) -> bool:
    """Whether this is a table of patterns of names and numbers above 0."""
    if not isinstance(table, dict):
        return False
    try:
        for pattern in table:
            compile_pattern(pattern)
    except PatternError:
        return False
    return all(isinstance(value, int | float) and value > 0 for value in table.values())
