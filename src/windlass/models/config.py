"""Hyperparameters of a GPT- or BERT-style transformer (this module does not import torch)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from windlass.models.positions.rope_scaling import RopeScaling
from windlass.schema import SparsityRequest

NormType = Literal["layer", "rms", "zero_centered_rms"]
"""`zero_centered_rms` multiplies by 1 plus the weight, as Gemma does."""
PositionEncoding = Literal["learned", "rotary"]
Activation = Literal["gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"]
"""Those that end in `glu` multiply an activated gate with the input (Shazeer 2020,
arXiv:2002.05202); `tanh` approximates the GELU."""
BlockLayout = Literal["pre_norm", "post_norm", "sandwich_norm", "parallel", "parallel_one_norm"]
"""How attention, feed-forward and their norms are arranged in a block.

`pre_norm`: attention, then feed-forward, each after its own norm. `post_norm`: each branch's sum
with its input is normalised, the embedding too, and the head transforms before it projects.
`sandwich_norm`: as `pre_norm`, and each branch's result is normalised before it is added.
`parallel`: both branches read the block's input, each through its own norm. `parallel_one_norm`:
both branches read the same normalised input."""

RouterScores = Literal["softmax", "sigmoid"]
"""What makes scores of a router's logits. A softmax over the chosen experts alone is `softmax` with
`norm_topk`: dividing by the sum of the chosen scores leaves the same numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """The mixture of experts in place of a block's feed-forward branch.

    Shape letters: experts E, chosen by each token k, inner width of an expert f.
    """

    count: int
    """Experts E of a layer."""
    per_token: int = 2
    """Experts k that each token takes."""
    ffn: int
    """Inner width f of one expert."""
    shared_ffn: int | None = None
    """Inner width of the expert that all tokens take, of several together; None has none."""
    shared_gate: bool = False
    """Whether a token's shared expert counts by a gate of its own, as in Qwen2-MoE."""
    scores: RouterScores = "softmax"
    norm_topk: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    capacity: float | None = None
    """Most tokens that an expert takes of a sequence, as a multiple of an equal share; the later
    ones go without it. None drops no token."""
    balance_loss: float = 0.0
    """Factor of the balance loss of each sequence."""
    balance_bias: float | None = None
    """How much the bias by which experts are chosen moves in a step, towards those with fewer
    tokens; None has no bias. Source: Wang et al. 2024, arXiv:2408.15664."""
    every: int = 1
    """One block of so many has experts, the last of each such run."""
    dense_layers: int = 0
    """First blocks that keep a plain feed-forward branch."""

    def has_experts(self, block: int) -> bool:
        """Whether a block has experts, by its index from 0."""
        return block >= self.dense_layers and (block + 1) % self.every == 0

    def slots(self, sequence: int) -> int | None:
        """Most tokens that an expert takes of a sequence; None sets no limit."""
        if self.capacity is None:
            return None
        return ceil(self.capacity * sequence * self.per_token / self.count)

    def errors(self) -> Iterator[str]:
        """Every reason why a layer cannot have such experts."""
        for name, value in (("experts", self.count), ("expert_ffn", self.ffn)):
            if value < 1:
                yield f"`{name}` is {value}, must be at least 1"
        if not 1 <= self.per_token <= max(self.count, 1):
            yield (
                f"`experts_per_token` is {self.per_token}, must be at least 1 and at most "
                f"`experts` {self.count}"
            )
        for name in ("shared_ffn", "capacity", "balance_bias"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"`{name}` is {value:g}, must be above 0"
        if self.balance_loss < 0:
            yield f"`balance_loss` is {self.balance_loss:g}, must be at least 0"
        if self.shared_gate and self.shared_ffn is None:
            yield "`shared_gate` is set, but there is no `shared_ffn` that it gates"
        if self.every < 1:
            yield f"`every` is {self.every}, must be at least 1"
        if self.dense_layers < 0:
            yield f"`dense_layers` is {self.dense_layers}, must be at least 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Queries, keys and values of narrow vectors (MLA, DeepSeek-AI 2024, arXiv:2405.04434)."""

    query_rank: int | None
    """Width of the vector that makes all queries; None makes them of the input."""
    key_rank: int
    plain_width: int
    """Features of a query or key that no position rotates."""
    rotary_width: int
    """Features that positions rotate; of keys, all heads share them."""
    value_width: int

    @property
    def head_width(self) -> int:
        """Features of a query or key."""
        return self.plain_width + self.rotary_width

    @property
    def mean_width(self) -> float:
        """Width of a head by which attention has `4 b h s^2 k` FLOP."""
        return (self.head_width + self.value_width) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Hyperparameters of a decoder-only or, as in BERT, encoder-only transformer.

    Shape letters: width d, heads h, feed-forward width f, vocabulary v, sequence s; the width of
    one head is d / h unless `head_dim` says otherwise.
    """

    name: str
    layers: int
    """Number of blocks, without embedding and head."""
    width: int
    """Hidden size d."""
    heads: int
    kv_heads: int
    """Key and value heads, a divisor of `heads`; equal to `heads` without grouped queries."""
    head_dim: int | None = None
    """Features of one head; None divides the width among the heads."""
    ffn: int
    """Inner width of the feed-forward branch."""
    vocabulary: int
    sequence: int
    """Longest sequence the model accepts; of images the class token and all patches."""
    image: tuple[int, int, int] | None = None
    """Channels, height and width of the images that the model takes; None takes tokens. The
    vocabulary is that of classes then."""
    patch: int = 16
    """Side of a patch of an image, in pixels."""
    norm: NormType = "layer"
    norm_epsilon: float = 1e-5
    norm_bias: bool = True
    """Whether a `layer` norm adds a bias."""
    embedding_norm: bool = False
    """Whether embedded tokens are normalised, so that the first block's attention is not."""
    head_transform: bool = False
    """Whether the head of a pre-norm model transforms before it projects, as BERT's does."""
    sentence_head: bool = False
    """Whether a post-norm model also says if the second sentence of a pair follows the first."""
    text_classes: int | None = None
    """Classes of a text, or of a pair of texts, of which a post-norm model says one; None predicts
    tokens."""
    positions: PositionEncoding = "learned"
    rotary_width: int | None = None
    """Features of each head that rotary positions rotate; None rotates all of them."""
    rotary_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    """How rotary angles slow down for longer sequences; None keeps them."""
    qk_norm: bool = False
    """Whether each head's queries and keys are RMS-normalised before their rotation."""
    sliding_window: int | None = None
    """A token sees only those less than this many positions away; None sees all."""
    window_blocks: tuple[bool, ...] = (True,)
    """Which blocks have the sliding window, repeated over all blocks."""
    window_rotary_base: float | None = None
    """Base of rotary positions in blocks with a sliding window, which are not scaled then; None
    means that these are as in all blocks."""
    score_width: int | None = None
    """Scores of attention are divided by its square root; None means the width of a head."""
    attention_softcap: float | None = None
    """Largest score c of attention, `c tanh(score / c)`; None bounds no score."""
    logit_softcap: float | None = None
    """The same of the logits."""
    activation: Activation = "gelu_tanh"
    block_layout: BlockLayout = "pre_norm"
    causal: bool = True
    """Whether the model predicts the next token and attends only to earlier ones. Otherwise it
    attends to all tokens and predicts masked ones."""
    attention_bias: bool = True
    """Whether queries, keys and values have a bias, and with it the projection after them."""
    projection_bias: bool | None = None
    """Whether the projection after attention has a bias; None means as queries do."""
    ffn_bias: bool = True
    head_bias: bool = False
    scaled_embedding: bool = False
    """Whether embedded tokens are multiplied by sqrt(d)."""
    tied_embeddings: bool = True
    """Whether the head's projection shares its weight with the token embedding."""
    dropout: float = 0.0
    split_blocks: bool = False
    """Whether attention and feed-forward are separate layers, so that a pipeline stage can end
    between them."""
    experts: ExpertConfig | None = None
    """Experts in place of the feed-forward branch; None has none."""
    latent: LatentAttention | None = None
    """How attention makes queries, keys and values of narrow vectors; None makes them directly."""
    sparsity: SparsityRequest | None = None
    """Which weights of the blocks are absent; None keeps all."""
    source: str = ""
    """Publication that the numbers come from."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images.

        Raises:
            ValueError: the model takes tokens.
        """
        if self.image is None:
            raise ValueError(f"`{self.name}` takes tokens, not images")
        return self.image

    @property
    def positions_of_image(self) -> int:
        """The class token and all patches of an image."""
        _, height, width = self.image_shape
        return 1 + (height // self.patch) * (width // self.patch)

    @property
    def takes_pairs(self) -> bool:
        """Whether tokens may be of a second segment."""
        return self.sentence_head or self.text_classes is not None

    @property
    def head_width(self) -> int:
        """Features of one head, k."""
        return self.head_dim or self.width // self.heads

    @property
    def has_projection_bias(self) -> bool:
        """Whether the projection after attention has a bias."""
        return self.attention_bias if self.projection_bias is None else self.projection_bias

    @property
    def query_width(self) -> int:
        """Features of the queries of all heads, which differ from d where `head_dim` does."""
        return self.heads * self.head_width

    @property
    def has_head_transform(self) -> bool:
        """Whether the head transforms before it projects."""
        return self.head_transform or self.block_layout == "post_norm"

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward branch multiplies its input with a gate."""
        return self.activation in ("swiglu", "geglu", "geglu_tanh")

    @property
    def windows(self) -> tuple[bool, ...]:
        """Whether each block has a sliding window, if the model has one."""
        return tuple(
            self.window_blocks[index % len(self.window_blocks)] for index in range(self.layers)
        )

    @property
    def visible_tokens(self) -> tuple[int, int] | None:
        """How many tokens before and behind it a token sees by its window; None without one."""
        if self.sliding_window is None:
            return None
        return self.sliding_window - 1, 0 if self.causal else self.sliding_window - 1

    @property
    def scored_width(self) -> int:
        """Number whose square root divides the scores of attention."""
        return self.head_width if self.score_width is None else self.score_width

    def of_block(self, index: int) -> "TransformerConfig":
        """The configuration of one block, which has a sliding window or not, and experts or not.

        Its `embedding_norm` says whether it reads what the embedding has normalised.
        """
        config = replace(self, embedding_norm=self.embedding_norm and index == 0)
        if self.experts is not None and not self.experts.has_experts(index):
            config = replace(config, experts=None)
        if self.sliding_window is None:
            return config
        if not self.windows[index]:
            return replace(config, sliding_window=None)
        if self.window_rotary_base is None:
            return config
        return replace(config, rotary_base=self.window_rotary_base, rope_scaling=None)

    def errors(self) -> tuple[str, ...]:
        """Every reason why this model cannot be built, one sentence each; empty if it can."""
        errors: list[str] = []
        counts = (
            "layers", "width", "heads", "kv_heads", "ffn", "vocabulary", "sequence", "patch",
        )  # fmt: skip
        low = [name for name in counts if getattr(self, name) < 1]
        errors += [f"`{name}` is {getattr(self, name)}, must be at least 1" for name in low]
        if not 0 <= self.dropout < 1:
            errors.append(f"`dropout` is {self.dropout:g}, must be at least 0 and below 1")
        errors += self._layout_errors()
        if low:
            return tuple(errors)
        if self.rope_scaling is not None:
            errors += self.rope_scaling.errors()
        errors += self._score_errors()
        if self.latent is not None:
            errors.append("other stacks alone compute latent attention; name one (`--stack`)")
        if self.experts is not None:
            errors += self._expert_errors(self.experts)
        errors += self._image_errors()
        if self.width % self.heads and self.head_dim is None:
            below = self.width // self.heads * self.heads
            nearest = [str(width) for width in (below, below + self.heads) if width]
            errors.append(
                f"`width` {self.width} is not divisible by `heads` {self.heads}; "
                f"use `width` {' or '.join(nearest)}"
            )
        elif self.positions == "rotary" and self.rotated_width % 2:
            errors.append(
                f"rotary positions rotate {self.rotated_width} features of a head, must be an even "
                f"number; change `width` {self.width} or `heads` {self.heads}"
            )
        elif self.rotated_width > self.head_width:
            errors.append(
                f"rotary positions rotate {self.rotated_width} features of a head, which has only "
                f"{self.head_width}; raise `width` {self.width} or lower `heads` {self.heads}"
            )
        if self.heads % self.kv_heads:
            errors.append(f"`heads` {self.heads} is not divisible by `kv_heads` {self.kv_heads}")
        return tuple(errors)

    def _layout_errors(self) -> Iterator[str]:
        """What does not go with the layout of the blocks."""
        if self.split_blocks and self.block_layout.startswith("parallel"):
            yield (
                "`split_blocks` splits a block between attention and feed-forward, but in this "
                "model both read the block's input in parallel; leave it out"
            )
        if self.takes_pairs and self.block_layout != "post_norm":
            name = "sentence_head" if self.sentence_head else "classes"
            yield f"`{name}` is of models such as BERT; leave it out, or take `bert-base`"
        if self.sentence_head and self.text_classes is not None:
            yield "`sentence_head` is of masked tokens, not of `classes`; leave one of them out"

    def _image_errors(self) -> Iterator[str]:
        """Why images cannot be cut into patches."""
        if self.image is not None and self.image[1:] != self._whole_patches:
            height, width = self.image[1:]
            yield (
                f"images of {height} x {width} pixels are no whole number of patches of `patch` "
                f"{self.patch}; change `model.patch` or `model.input_shape`"
            )

    @property
    def _whole_patches(self) -> tuple[int, int]:
        """Height and width of the images, rounded down to whole patches of which there is one."""
        _, *sides = self.image_shape
        height, width = (max(1, side // self.patch) * self.patch for side in sides)
        return height, width

    @property
    def rotated_width(self) -> int:
        """Features of each head that rotary positions rotate; 0 with learned positions."""
        if self.positions == "learned":
            return 0
        return self.head_width if self.rotary_width is None else self.rotary_width

    def _score_errors(self) -> Iterator[str]:
        """Every reason why attention cannot compute such scores."""
        if self.sliding_window is not None and self.sliding_window < 1:
            yield f"`sliding_window` is {self.sliding_window}, must be at least 1"
        if not self.window_blocks:
            yield "`window_blocks` is empty, must say of one block at least"
        for name in ("rotary_base", "window_rotary_base"):
            value = getattr(self, name)
            if value is not None and value <= 1:
                yield f"`{name}` is {value:g}, must be above 1"
        for name in ("score_width", "attention_softcap", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"`{name}` is {value:g}, must be above 0"

    def _expert_errors(self, experts: ExpertConfig) -> Iterator[str]:
        """Every reason why blocks cannot have such experts."""
        yield from experts.errors()
        if experts.every > 0 and not any(map(experts.has_experts, range(self.layers))):
            yield (
                f"none of {self.layers} layers has experts with `dense_layers` "
                f"{experts.dense_layers} and `expert_every` {experts.every}; lower these"
            )
        if self.ffn_bias:
            yield "experts have no bias, but `ffn_bias` is set; take a model of the Llama family"
        if self.sparsity is not None:
            yield "weights of experts cannot be absent; leave out `sparsity`"
