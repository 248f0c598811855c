"""Draws runs at random: models, shapes and plans that nobody chose.

A run depends on the seed and its own number only, so that the first ten of forty are the ten. The
sorts take turns. Sizes are drawn for a step of 0.1 to 1.6 s at a fixed rate, not at a predicted
one, so that a seed draws the same runs under every version and on every machine. A run that a
machine is too slow for is cut to a share of its size; its model, form and sort stay.
"""

from collections.abc import Callable, Iterator
from math import sqrt
from random import Random
from typing import NamedTuple

from windlass.errors import RequestError

_RATE = 250e9
"""FLOP/s that the sizes are drawn for."""
_STEP_SECONDS = (0.1, 1.6)
_MOST_PARAMETERS = 80e6
"""A run saves 12 bytes of each at its end."""
_MOST_SCORES = 1.5e9
"""Bytes of logits and of attention scores of one micro-batch, roughly."""
_LEAST_POSITIONS = 16
_END_LAYERS = 2
"""Layers of a stack beside its blocks: its embedding and its head."""
OWN = "windlass"
"""The own runtime, among stacks."""
_FREE = "planner's choice"
"""The sort of which nothing is pinned."""
_LEAST_SEQUENCE = 16
"""Tokens that no sequence is cut below."""
_VOCABULARIES = (4160, 8192, 16000, 32000, 50257)
"""All hold the default tokenizer's 4,096 entries and BERT's mask."""


class _Shape(NamedTuple):
    """Sizes of a model; letters as in `TransformerConfig`."""

    model: str
    layers: int
    heads: int
    head_width: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence: int

    @property
    def width(self) -> int:
        return self.heads * self.head_width

    @property
    def parameters(self) -> int:
        """Roughly, without norms and biases."""
        return self.layers * self.width * (4 * self.width + 3 * self.ffn) + (
            self.vocabulary * self.width
        )

    @property
    def flop(self) -> float:
        """FLOP of one sequence's step, roughly: `6 p s + 12 l s^2 d`."""
        return self.sequence * (
            6.0 * self.parameters + 12.0 * self.layers * self.sequence * self.width
        )

    def overrides(self) -> tuple[str, ...]:
        sizes = {
            "layers": self.layers, "width": self.width, "heads": self.heads,
            "kv_heads": self.kv_heads, "ffn": self.ffn, "vocabulary": self.vocabulary,
            "sequence": max(self.sequence, _LEAST_POSITIONS),
        }  # fmt: skip
        return tuple(f"model.{name}={size}" for name, size in sizes.items())


class DrawnRun(NamedTuple):
    """One run: a model with its dials, its batch, and what is pinned of its plan."""

    number: int
    sort: str
    """What the run is drawn for: an entry of `SORTS`."""
    shape: _Shape
    micro: int
    """Sequences of a micro-batch on one replica."""
    accumulation: int
    replicas: int
    pins: tuple[str, ...]
    """`key=value` of the plan."""

    @property
    def model(self) -> str:
        """Name of the catalogue model that it is a size of."""
        return self.shape.model

    @property
    def overrides(self) -> tuple[str, ...]:
        """`key=value` of the request."""
        batch = self.micro * self.accumulation * self.replicas
        found: tuple[str, ...] = (f"train.batch={batch}", f"train.sequence={self.shape.sequence}")
        if self.sort != _FREE:
            found += (f"batch.micro={self.micro}",)
        return (*self.shape.overrides(), *found, *self.pins)

    def cut(self, share: float) -> "DrawnRun | None":
        """The run with a smaller step; None if it is as small as it gets.

        Layers and tokens are cut alike, because some steps wait for their weights and some for
        their tokens: micro-batches first, then their number, then their length.

        Args:
            share: the share of its FLOP that should be left, below 1.
        """
        least = max(1, self._phases - _END_LAYERS)
        layers = max(min(least, self.shape.layers), int(self.shape.layers * sqrt(share)))
        tokens = share * self.shape.layers / layers
        micro = max(1, min(self.micro, int(self.micro * tokens)))
        tokens *= self.micro / micro
        accumulation = max(1, min(self.accumulation, int(self.accumulation * tokens)))
        tokens *= self.accumulation / accumulation
        least = min(_LEAST_SEQUENCE, self.shape.sequence)
        sequence = max(least, min(self.shape.sequence, int(self.shape.sequence * tokens)))
        shape = self.shape._replace(layers=layers, sequence=sequence)
        smaller = self._replace(shape=shape, micro=micro, accumulation=accumulation)
        return None if smaller == self else smaller

    @property
    def _phases(self) -> int:
        """Phases that are pinned."""
        named = dict(pin.split("=", 1) for pin in self.pins)
        return int(named.get("phases", 1))


def draw_runs(count: int, seed: int, stack: str = OWN) -> tuple[DrawnRun, ...]:
    """The first `count` runs of a seed.

    Args:
        count: number of runs.
        seed: seed of the draw.
        stack: what runs them, a key of `SORTS`.

    Raises:
        RequestError: `count` is below 1, or nothing here runs the plans of the stack.
    """
    if count < 1:
        raise RequestError(f"`--random {count}` draws no plan; ask for at least 1")
    if stack not in SORTS:
        names = " or ".join(f"`--stack {name}`" for name in SORTS)
        raise RequestError(f"no plan of `{stack}` runs here; choose {names}")
    sorts = tuple(SORTS[stack])
    return tuple(
        _draw(number, sorts[number % len(sorts)], Random(f"{seed}/{number}"), stack)
        for number in range(count)
    )


def _draw(number: int, sort: str, random: Random, stack: str) -> DrawnRun:
    shape = _tiny_shape(random) if sort == "tiny sequence" else _shape(random)
    low, high = _STEP_SECONDS
    seconds = low * (high / low) ** random.random()
    batch = max(1, round(seconds * _RATE / shape.flop))
    if sort == "tiny sequence":
        batch = random.randint(1, 2)
    accumulation = random.choice([count for count in (1, 1, 2, 3, 4) if count <= batch])
    limit = _MOST_SCORES / (4 * shape.sequence * max(shape.vocabulary, shape.width * 16))
    micro = max(1, min(round(batch / accumulation), int(limit)))
    pins = SORTS[stack][sort](shape, random)
    if stack != OWN:
        pins += (f"stack={stack}",)
    replicas = 1
    if "parallel.data=2" in pins:
        micro, replicas = max(1, micro // 2), 2
    return DrawnRun(number, sort, shape, micro, accumulation, replicas, pins)


def _shape(random: Random) -> _Shape:
    model = random.choice(("gpt2-124m", "gpt2-124m", "llama2-7b", "bert-base"))
    form = random.choice(("plain", "plain", "wide", "narrow", "long", "odd"))
    sequence: tuple[int, ...]
    vocabulary = random.choice(_VOCABULARIES)
    head_width, ratio = 64, random.choice((2.0, 2.75, 4.0))
    if form == "wide":
        heads, layers, sequence = random.randint(14, 32), random.randint(1, 3), (64, 128, 256)
    elif form == "narrow":
        head_width = 32
        heads, layers, sequence = random.randint(2, 6), random.randint(4, 14), (128, 256, 512)
    elif form == "long":
        heads, layers, sequence = random.randint(2, 6), random.randint(2, 4), (1024, 1536, 2560)
    elif form == "odd":
        head_width = random.choice((20, 36, 40, 72, 80, 96, 128))
        heads, layers = 2 * random.randint(1, 4), random.randint(2, 6)
        sequence = (random.randint(40, 700),)
        vocabulary, ratio = random.randint(4200, 40000) // 2 * 2, random.uniform(1.5, 4.5)
    else:
        heads, layers, sequence = random.randint(3, 12), random.randint(2, 8), (128, 256, 512)
    heads += heads % 2  # two tensor-parallel ranks must be able to share them
    kv_heads = heads // 2 if model == "llama2-7b" and random.random() < 0.5 else heads
    kv_heads = kv_heads if kv_heads % 2 == 0 else heads
    ffn = int(heads * head_width * ratio) // 2 * 2
    shape = _Shape(
        model, layers, heads, head_width, kv_heads, ffn, vocabulary, random.choice(sequence)
    )
    while shape.parameters > _MOST_PARAMETERS and shape.layers > 1:
        shape = shape._replace(layers=shape.layers - 1)
    return shape


def _tiny_shape(random: Random) -> _Shape:
    """A model of which a step is mostly launches."""
    heads = random.choice((2, 4))
    return _Shape(
        random.choice(("gpt2-124m", "llama2-7b", "bert-base")), random.randint(2, 6), heads, 32,
        heads, 128 * heads, 4160, random.choice((4, 8, 16, 32)),
    )  # fmt: skip


def _numerics(random: Random) -> Iterator[str]:
    """Precision and compilation, for sorts that are drawn for something else."""
    precision = random.choice(("float32", "bfloat16"))
    yield f"precision={precision}"
    compiled = precision == "bfloat16" and random.random() < 0.5
    yield f"compile={str(compiled).lower()}"


def _eager(precision: str) -> Callable[[_Shape, Random], tuple[str, ...]]:
    return lambda _shape, _random: (f"precision={precision}", "compile=false", "recompute=none")


def _compiled(_: _Shape, random: Random) -> tuple[str, ...]:
    precision = random.choice(("bfloat16", "bfloat16", "float32"))
    return (
        f"precision={precision}",
        "compile=true",
        f"recompute={random.choice(('none', 'full'))}",
    )


def _recompute(_: _Shape, random: Random) -> tuple[str, ...]:
    precision = random.choice(("float32", "bfloat16"))
    how = random.choice(("selective", "full"))
    return (f"precision={precision}", "compile=false", f"recompute={how}")


def _moments(_: _Shape, random: Random) -> tuple[str, ...]:
    return (*_numerics(random), f"moments={random.choice(('int8', 'bfloat16'))}")


def _phases(shape: _Shape, random: Random) -> tuple[str, ...]:
    phases = random.randint(2, min(6, shape.layers + 2))
    return (*_numerics(random), f"phases={phases}")


def _offload(_: _Shape, random: Random) -> tuple[str, ...]:
    return (*_numerics(random), "phases=1", "offload.optimizer=disk")


def _processes(_: _Shape, random: Random) -> tuple[str, ...]:
    axis = random.choice(("pipeline", "tensor", "data"))
    pins = [f"parallel.{axis}=2", *_numerics(random)]
    if axis == "data":
        sharding = random.choice(((1, 1), (1, 2), (2, 2)))
        pins += [f"sharding.parameters={sharding[0]}", f"sharding.optimizer={sharding[1]}"]
    return tuple(pins)


def _ranks(*pins: str) -> Callable[[_Shape, Random], tuple[str, ...]]:
    """Pinned ranks, with layers of any precision, some of them compiled or computed again."""

    def draw(_: _Shape, random: Random) -> tuple[str, ...]:
        return (*pins, *_numerics(random), f"recompute={random.choice(('none', 'none', 'full'))}")

    return draw


_OWN_SORTS: dict[str, Callable[[_Shape, Random], tuple[str, ...]]] = {
    _FREE: lambda _shape, _random: (),
    "bfloat16 eager": _eager("bfloat16"),
    "compiled": _compiled,
    "float32 eager": _eager("float32"),
    "phases": _phases,
    "processes": _processes,
    "recompute": _recompute,
    "moments": _moments,
    "optimizer offloaded": _offload,
    "tiny sequence": lambda _shape, random: (*_numerics(random),),
}
_SHARDS = ("parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2")
_TORCH_SORTS = {
    "replicas": _ranks("parallel.data=2", "sharding.parameters=1", "sharding.optimizer=1"),
    "shards": _ranks(*_SHARDS, "sharding.reshard=false"),
    "stages": _ranks("parallel.pipeline=2"),
    "tensor parallel": _ranks("parallel.tensor=2"),
    "shards, resharded": _ranks(*_SHARDS, "sharding.reshard=true"),
}
SORTS = {OWN: _OWN_SORTS, "torch": _TORCH_SORTS}
"""What runs of a stack are drawn for, each with what it pins; they take turns."""
