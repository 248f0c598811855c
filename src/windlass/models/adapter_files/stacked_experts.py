"""Adapters of experts as PEFT writes them beside transformers 5: a tensor for all of a layer's.

There the experts of a layer are two parameters, and an adapter stands beside each: gate and up
share one. A is `[E*rank in]`, expert by expert; B is `[out rank*E]`, whose columns go rank by rank.
Source: peft 0.21, `ParamWrapper`; transformers 5, `conversion_mapping`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from windlass.models.huggingface.weight_files import StoredTensor, read_tensor

PEFT_PREFIX = "base_model.model."
FACTORS = (".lora_A.weight", ".lora_B.weight")
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_HALVES = {"gate": 0, "up": 1}
"""Which half of the rows of B is whose."""
_FACTOR_DIMENSIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFactor:
    """One expert's factor in the tensor of all, in the place of a tensor of its own."""

    name: str
    """The tensor's name."""
    tensor: StoredTensor
    parameter: str
    """Full name of the parameter beside which the adapter stands."""
    expert: int
    experts: int
    half: int | None
    """Whose half of B's rows it is; None for all of them."""

    @property
    def dtype(self) -> str:
        """As `StoredTensor.dtype`."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """`[rank in]` or `[out rank]`."""
        rows, columns = self.tensor.shape
        if self.name.endswith(FACTORS[0]):
            return (rows // self.experts, columns)
        return (rows if self.half is None else rows // 2, columns // self.experts)

    def read(self) -> Tensor:
        """The values.

        Raises:
            ModelError: the file cannot be read any more.
        """
        stacked = read_tensor(self.name, self.tensor)
        if self.name.endswith(FACTORS[0]):
            return stacked.view(self.experts, *self.shape)[self.expert]
        own = stacked.view(len(stacked), -1, self.experts)[:, :, self.expert]
        return own if self.half is None else own.chunk(2)[self.half]


def split_stacked(
    stored: Mapping[str, StoredTensor],
    experts: Mapping[str, tuple[str, ...]],
    routers: Iterable[str],
    targets: object,
) -> dict[str, StoredTensor | ExpertFactor]:
    """The tensors of a folder, where experts that stand together have a factor each.

    Args:
        stored: all tensors by name.
        experts: by full name of our layer of experts, the module that each expert would be.
        routers: modules that are routers.
        targets: names of the parameters that have adapters, as the configuration says.
    """
    used: set[str] = set()
    factors: dict[str, StoredTensor | ExpertFactor] = dict(_of_routers(stored, routers))
    used.update(each.name for each in factors.values() if isinstance(each, ExpertFactor))
    for linear, modules in experts.items():
        place = _name_in_five(modules[0].rsplit(".", 2)[0])
        role = linear.rpartition(".")[2]
        parameter = _DOWN if role == "down" else _GATE_UP
        adapter = _adapter_of(stored, place, parameter, str(targets))
        for end in FACTORS if adapter else ():
            name = f"{PEFT_PREFIX}{adapter}{end}"
            if name not in stored or len(stored[name].shape) != _FACTOR_DIMENSIONS:
                continue
            used.add(name)
            half = _HALVES.get(role) if end == FACTORS[1] else None
            for number, module in enumerate(modules):
                factors[f"{PEFT_PREFIX}{module}{end}"] = ExpertFactor(
                    name=name, tensor=stored[name], parameter=f"{place}.{parameter}",
                    expert=number, experts=len(modules), half=half,
                )  # fmt: skip
    return {name: tensor for name, tensor in stored.items() if name not in used} | factors


def _of_routers(
    stored: Mapping[str, StoredTensor], routers: Iterable[str]
) -> Iterator[tuple[str, ExpertFactor]]:
    """The factors beside routers that stand under another name there, by the name that we know."""
    for module in routers:
        own = _name_in_five(module)
        for end in FACTORS if own != module else ():
            name = f"{PEFT_PREFIX}{own}{end}"
            if name in stored and len(stored[name].shape) == _FACTOR_DIMENSIONS:
                factor = ExpertFactor(
                    name=name, tensor=stored[name], parameter=f"{own}.weight",
                    expert=0, experts=1, half=None,
                )  # fmt: skip
                yield f"{PEFT_PREFIX}{module}{end}", factor


def _name_in_five(module: str) -> str:
    """The name of a module in transformers 5, which has one name for the branch of every type."""
    return module.replace(".block_sparse_moe.", ".mlp.")


def _adapter_of(
    stored: Mapping[str, StoredTensor], place: str, parameter: str, targets: str
) -> str | None:
    """The module with the adapter of a parameter; None if there is none.

    Where there are two, the inner one stands beside gate and up; one alone stands beside the
    parameter that the configuration names.
    """
    inner = f"{place}.base_layer"
    if f"{PEFT_PREFIX}{inner}{FACTORS[0]}" in stored:
        return place if parameter == _DOWN else inner
    return place if parameter in targets else None
