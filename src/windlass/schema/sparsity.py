"""SparsityRequest: which weights of a model are absent, in what pattern, and when."""

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from windlass.schema.model_request import LoraRequest, ModelRequest, Name, RequestTable

SparseRole = Literal["query", "key", "value", "projection", "up", "down"]
"""What a weight does in a block: parts of attention's input, its output, and the two (in gated
branches three) products of the feed-forward branch. A gate counts as `up`."""
SparsityDistribution = Literal["uniform", "erdos-renyi"]
SparsitySchedule = Literal["static", "set", "rigl", "gradual", "then-dense"]

BLOCK_PATTERNS = ("block", "block-diagonal")
"""Patterns of whole blocks, of which only the kept ones are stored and computed."""
BLOCK_SIZES = (16, 32, 64, 128)
_DEFAULT_LEVEL = 0.875
_LEGS: dict[str, int] = {"gradual": 5, "then-dense": 2}
"""Number of legs by schedule. `gradual` prunes at the end of each but the last, and each is a new
plan whose layers are compiled again: so they are few."""
_N_OF_M = re.compile(r"([1-9]\d?):([1-9]\d?)")


def _require_pattern(pattern: str) -> str:
    match = _N_OF_M.fullmatch(pattern)
    if pattern in (*BLOCK_PATTERNS, "unstructured") or (match and int(match[1]) < int(match[2])):
        return pattern
    raise ValueError(
        "should be `block`, `block-diagonal`, `unstructured`, or n:m such as `2:4`, which keeps 2 "
        "of every 4 inputs"
    )


Level = Annotated[float, Field(ge=0, lt=1)]
"""A share of weights that are absent."""


class SparsityRequest(RequestTable):
    """Weights that are absent: how many, in what pattern, in which roles, and until when."""

    level: Level | None = None
    """Share of weights that are absent, of all sparse roles together that `sparsity.roles` does not
    name; None means 0.875, or what an n:m pattern or a mask says."""
    pattern: Annotated[str, AfterValidator(_require_pattern)] = "block"
    """Which weights are kept: `block` (random blocks, as many in each row and in each column),
    `block-diagonal` (dense tiles under a random permutation), `unstructured` or n:m such as `2:4`
    (both only masks: no faster than dense)."""
    block: int = 64
    """Rows and columns of a block: 16, 32, 64 or 128."""
    distribution: SparsityDistribution = "uniform"
    """How the level is spread over roles: the same for each, or by `erdos-renyi`, which keeps more
    of small weights."""
    roles: dict[SparseRole, Level] | None = None
    """Level of single roles: `query`, `key`, `value`, `projection`, `up`, `down`; at 0 a role stays
    dense."""
    modules: Name | tuple[Name, ...] | None = None
    """Pattern of the names of linear layers that become sparse, `*` for one name between dots, or a
    list of patterns; a model of your own needs them. None means all layers with a role."""
    mask: Name | None = None
    """File of masks to start from, as `windlass export --masks` writes it; None draws them from the
    seed."""
    schedule: SparsitySchedule = "static"
    """When the mask changes: never, by `set`, `rigl` or `gradual` pruning, or to dense at the
    end."""
    until: float = Field(default=0.7, gt=0, le=1)
    """Share of the steps after which the mask no longer changes, `gradual` has reached its level,
    or `then-dense` trains all weights."""
    every: int = Field(default=100, ge=1, le=2**40)
    """Steps from one change of the mask to the next."""
    drop: float = Field(default=0.3, gt=0, lt=1)
    """Share of the blocks that the first change replaces; later ones follow half a cosine to 0."""
    leg: int = Field(default=0, ge=0)
    """Leg of the run whose layers are meant: weights keep their shapes in a leg. `then-dense` has
    two, `gradual` five, any other schedule one. A run begins with 0 and changes it by itself."""

    @field_validator("block")
    @classmethod
    def _block_has_kernels(cls, block: int) -> int:
        if block not in BLOCK_SIZES:
            raise ValueError(f"should be one of {', '.join(map(str, BLOCK_SIZES))}")
        return block

    @field_validator("level", mode="before")
    @classmethod
    def _level_leaves_weights(cls, level: Any) -> Any:  # noqa: ANN401  not validated yet
        if isinstance(level, int | float) and not 0 <= level < 1:
            raise ValueError(
                "should be the share of weights that are absent, at least 0 and less than 1, such "
                "as 0.875"
            )
        return level

    @field_validator("modules", mode="before")
    @classmethod
    def _modules_are_patterns(cls, modules: Any) -> Any:  # noqa: ANN401  not validated yet
        if modules is None:
            return None
        is_list = isinstance(modules, list | tuple)
        # A layer of an `nn.Sequential` is named by a number.
        names = [
            str(name) if type(name) is int else name
            for name in (modules if is_list else (modules,))
        ]
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(
                "should be a pattern of names such as `blocks.*.up`, or a list of them"
            )
        return tuple(names) if is_list else names[0]

    @field_validator("roles", mode="before")
    @classmethod
    def _roles_are_known(cls, roles: Any) -> Any:  # noqa: ANN401  not validated yet
        known = get_args(SparseRole)
        unknown = [role for role in roles if role not in known] if isinstance(roles, dict) else []
        if unknown:
            names = ", ".join(f"`{role}`" for role in unknown)
            raise ValueError(
                f"{names} should be one of {', '.join(known)}; the gate of a feed-forward branch "
                "counts as `up`"
            )
        return roles

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if faults := tuple(self._faults()):
            raise ValueError("; ".join(faults))
        return self

    def __hash__(self) -> int:
        """Hash of everything but the roles, which are not hashable."""
        names = type(self).model_fields.keys() - {"roles"}
        return hash(tuple(getattr(self, name) for name in sorted(names)))

    @property
    def n_of_m(self) -> tuple[int, int] | None:
        """N and m of an n:m pattern; None for any other."""
        match = _N_OF_M.fullmatch(self.pattern)
        return (int(match[1]), int(match[2])) if match else None

    @property
    def module_patterns(self) -> tuple[str, ...] | None:
        """The patterns of `modules`, also if there is one."""
        return (self.modules,) if isinstance(self.modules, str) else self.modules

    @property
    def is_blocked(self) -> bool:
        """Whether whole blocks are absent, so that only kept ones are stored and computed."""
        return self.pattern in BLOCK_PATTERNS

    @property
    def changes_masks(self) -> bool:
        """Whether blocks are replaced by others while weights keep their shapes."""
        return self.schedule in ("set", "rigl")

    @property
    def legs(self) -> int:
        """Number of legs of a run."""
        return _LEGS.get(self.schedule, 1)

    @property
    def target_level(self) -> float:
        """The level that is asked for, of all roles together that have none of their own."""
        if self.level is not None:
            return self.level
        n_of_m = self.n_of_m
        return 1 - n_of_m[0] / n_of_m[1] if n_of_m else _DEFAULT_LEVEL

    def _faults(self) -> list[str]:
        """What cannot be asked for together, a sentence each."""
        faults = []
        if (n_of_m := self.n_of_m) is not None:
            n, m = n_of_m
            levels = [(f"`roles.{role}`", level) for role, level in (self.roles or {}).items()]
            levels.append(("`level`", self.target_level))
            faults += [
                f"{name} = {level:g}, but `pattern` = {self.pattern} keeps {n} of {m} weights, a "
                f"level of {1 - n / m:g}; leave it out"
                for name, level in levels
                if abs(level - (1 - n / m)) > 1e-9 and (name == "`level`" or level)
            ]
            if self.distribution != "uniform":
                faults.append(
                    f"`distribution` = {self.distribution} with `pattern` = {self.pattern}, which "
                    "has one level; leave it out"
                )
        if self.mask is not None:
            faults += [
                f"`{name}` with `mask` = {self.mask!r}, which decides it; leave one of them out"
                for name in ("level", "roles", "modules")
                if getattr(self, name) is not None
            ]
        return faults + self._schedule_faults()

    def _schedule_faults(self) -> list[str]:
        """What the schedule cannot do, a sentence each."""
        faults = []
        schedule = f"`schedule` = {self.schedule}"
        if self.pattern != "block" and self.schedule in ("set", "rigl", "gradual"):
            faults.append(
                f"{schedule} with `pattern` = {self.pattern}: it changes which blocks are kept; "
                "take `pattern` = block, or `schedule` = static or then-dense"
            )
        if self.mask is not None and self.schedule == "gradual":
            faults.append(f"{schedule} with `mask`: it begins dense; leave one of them out")
        if self.leg >= self.legs:
            faults.append(
                f"`leg` = {self.leg}, but {schedule} has {self.legs} "
                f"{'leg' if self.legs == 1 else 'legs'}, counted from 0; leave it out"
            )
        return faults


class ModelIdentity(ModelRequest):
    """All that decides a model's layers: name, dials, and which weights it has and trains."""

    sparsity: SparsityRequest | None = None
    """None keeps all weights."""
    lora: LoraRequest | None = None
    """Adapters beside linear layers; all other weights are frozen then. None means no adapter."""
    frozen: tuple[Name, ...] | None = None
    """Patterns of the names of frozen weights; None freezes none."""

    @property
    def saved(self) -> Self:
        """The same model once a checkpoint has its weights, with no other files to read."""
        if self.lora is None:
            return self
        lora = self.lora.model_copy(update={"base": None, "adapter": None})
        return self.model_copy(update={"lora": lora})

    @property
    def dense(self) -> ModelRequest:
        """The model's name and dials alone, as a request's `model` table."""
        fields = self.model_fields_set & set(ModelRequest.model_fields)
        return ModelRequest.model_validate({name: getattr(self, name) for name in fields})
