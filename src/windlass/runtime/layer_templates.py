"""Stateless layer templates: one module per layer type, called with a layer's current weights.

A template is on the meta device and uses no memory; 96 layers of one type share it and its compiled
code. The last layer's template includes the loss, mean cross-entropy in float32. With tensor
parallelism each rank has a template of its shard of the layer, whose passes communicate.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from windlass.models import (
    ContextParallelRank,
    ExpertParallelRank,
    HeadLosses,
    LayerStack,
    TensorParallelLoss,
    TensorParallelRank,
    balance_buffers,
    checkpoint_selectively,
    divide_experts,
    divide_sequence,
    document_buffers,
    exchanges_rows,
    expert_parameters,
    fake_state,
    fuse_loss,
    is_embedding_only,
    layer_loss,
    layer_sharding,
    meta_copy,
    pad_vocabulary,
    running_statistics,
    set_attention_backend,
    shard_layer,
    token_output,
    token_targets,
    use_float8,
)
from windlass.runtime.block_scores import BlockScores
from windlass.runtime.keyed_dropout import (
    DropoutKeys,
    KeyedDropout,
    disabled_keys,
    key_buffers,
    replace_dropout,
)
from windlass.runtime.parameters import is_hidden
from windlass.schema import AttentionBackend
from windlass.torch_ext import compile_method, device_for


class LayerTemplate:
    """One layer type as a function of its weights.

    Args:
        layer: any layer of the type, or its tensor-parallel shard, on any device; it is copied to
            the meta device without its weights.
        last: whether its output are logits, so that it includes the loss.
        fused: whether the loss is computed with the projection to the vocabulary, so that the
            logits never exist whole.
        z_loss: factor of the mean of `log^2 Z`, whose gradient joins the loss's.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        last: bool,
        compiled: bool,
        fused: bool = False,
        attention: AttentionBackend = "flash",
        z_loss: float = 0.0,
        float8: bool = False,
    ) -> None:
        self._module = meta_copy(layer)
        set_attention_backend(self._module, attention)
        if float8:
            use_float8(self._module)
        self._loss: Callable[[Tensor, Tensor], Tensor] | None = None
        if last:
            self._loss = layer_loss(self._module, z_loss)
        self._targets = fuse_loss(self._module, z_loss) if last and fused else None
        """Name of the buffer by which a fused loss takes its targets."""
        if last and not fused:
            pad_vocabulary(self._module)
        self.parameters = tuple(name for name, _ in self._module.named_parameters())
        """Parameter names inside the layer, in the order of `weights`."""
        self.buffers = tuple(name for name, _ in self._module.named_buffers())
        """Buffer names inside the layer, in the order of `buffers`."""
        self._documents = document_buffers(self._module)
        """Names of the buffers by which modules take the documents of packed rows."""
        self._balance = balance_buffers(self._module)
        """Names of the buffers that take the weight of one sequence's balance loss."""
        self._scores: BlockScores | None = None
        self._statistics = running_statistics(self._module)
        names = len(list(self._module.named_parameters(remove_duplicate=False)))
        self._has_ties = names > len(self.parameters)
        """Whether one parameter has several names; finding that out at each call takes time."""
        self._keyed = replace_dropout(self._module)
        self._dropouts = tuple(m for m in self._module.modules() if isinstance(m, KeyedDropout))
        self._draws_unkeyed: bool | None = None
        # Embedding lookups gain nothing from compilation, which has no sparse gradients either.
        self.compiled = compiled and not is_embedding_only(self._module)
        """Whether it runs as compiled code."""
        if not self.compiled:
            _use_sparse_gradients(self._module)
        self._run: Callable[..., Tensor] = self._call
        if self.compiled:
            self._run = compile_method(
                LayerTemplate._call, self, unknown_rows=exchanges_rows(self._module)
            )

    def score_blocks(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Lets backward passes compute scores of absent blocks, at the steps that ask for them."""
        self._scores = BlockScores(self._module, device, dtype)

    def ask_for_scores(self, *, active: bool) -> None:
        """Says whether backward passes from now on compute scores of absent blocks."""
        if self._scores is not None:
            self._scores.activate(active=active)

    @property
    def score_leaves(self) -> tuple[Tensor, ...]:
        """Inputs beside the weights, whose gradients are the scores of absent blocks."""
        return self._scores.leaves if self._scores is not None else ()

    @property
    def takes_documents(self) -> bool:
        """Whether its output depends on where the documents of a row begin."""
        return bool(self._documents)

    @property
    def takes_balance(self) -> bool:
        """Whether it has a loss of its own that balances experts."""
        return bool(self._balance)

    @property
    def has_dropout(self) -> bool:
        """Whether it contains dropout, and so needs keys."""
        return bool(self._keyed)

    @property
    def draws_unkeyed(self) -> bool | None:
        """Whether it draws random numbers other than keyed dropout's; None before its first run."""
        return self._draws_unkeyed

    @property
    def has_running_statistics(self) -> bool:
        """Whether a forward pass in training changes buffers, as that of a batch norm does."""
        return bool(self._statistics)

    @property
    def module(self) -> nn.Module:
        """The layer's module on the meta device."""
        return self._module

    def discarded_buffers(self, buffers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Buffers for a pass that repeats another one: the running statistics are copies."""
        named = zip(self.buffers, buffers, strict=True)
        return tuple(b.clone() if name in self._statistics else b for name, b in named)

    def __call__(
        self,
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
        keys: DropoutKeys | None,
        x: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        balance: Tensor | None = None,
        *,
        seed: int,
        selective: bool = False,
    ) -> Tensor:
        """The layer's output, or the loss of the last layer, in training.

        Args:
            keys: dropout keys of this call; None only if the template has no dropout.
            x: `Int[b s]` for the first layer, else `Float[b s d]`.
            targets: `Int[b s]`, for the last layer; `IGNORE_INDEX` does not count.
            documents: which document of its row each token belongs to, `Int[b s]`; None means that
                a row is one document.
            balance: weight of one sequence's balance loss, `Float[]`; None has none of these.
            seed: seed of torch's generator, for random draws other than `nn.Dropout`. They are
                reproduced in a recompute and after a resume, but depend on how the batch is
                divided into micro-batches.
            selective: whether only the results of large matrix products are kept for the backward
                pass; not for compiled code.
        """
        arguments = (list(weights), list(buffers), keys, x, targets, documents, balance)
        run = self._run_selectively if selective else self._run
        if self._draws_unkeyed is False:
            return run(*arguments)
        generator = device_for(x.device).default_generator()
        before = generator.get_state()
        generator.manual_seed(seed)
        if self._draws_unkeyed is None:
            seeded = generator.get_state()
            output = run(*arguments)
            self._draws_unkeyed = not torch.equal(generator.get_state(), seeded)
        else:
            output = run(*arguments)
        generator.set_state(before)
        return output

    def evaluate(
        self,
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
        x: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The layer's output, or the loss of the last layer, without dropout.

        It runs the code of training, in which keys disable keyed dropout. Only a layer with other
        random draws, or with running statistics, is switched to evaluation mode, for which torch
        compiles it once more.
        """
        keys = disabled_keys(x) if self._keyed else None
        arguments = (list(weights), list(buffers), keys, x, targets, documents, None)
        if self.compiled and not self._draws_unkeyed and not self._statistics:
            return self._run(*arguments)
        self._module.eval()
        try:
            return self._run(*arguments)
        finally:
            self._module.train()

    def raw_output(self, weights: Sequence[Tensor], buffers: Sequence[Tensor], x: Tensor) -> Tensor:
        """The output of the layer module: not compiled, no dropout, logits instead of the loss."""
        tensors = dict(zip(self.parameters + self.buffers, (*weights, *buffers), strict=True))
        if self._keyed:
            tensors |= key_buffers(self._keyed, disabled_keys(x))
        self._module.eval()
        try:
            return token_output(self._output(tensors, x))
        finally:
            self._module.train()

    def logits_of_all_tokens(self, output: Tensor) -> Tensor:
        """Logits `[b s v]` from what the last layer gives; of a sharded vocabulary `[b s v/t]`."""
        return (
            self._loss.all_tokens(output) if isinstance(self._loss, TensorParallelLoss) else output
        )

    def logits_of_all_columns(self, logits: Tensor) -> Tensor:
        """Logits `[t v]` of some tokens from those of the rank, `[t v/t]`."""
        return (
            self._loss.all_columns(logits) if isinstance(self._loss, TensorParallelLoss) else logits
        )

    def meta_output(self, x: Tensor) -> Tensor:
        """The output of the layer module on the meta device, for a tensor on it.

        It runs on fake tensors of the CPU, because code may ask for numbers of positions. How many
        rows arrive at divided experts stays a symbol, whose import takes a second.
        """
        symbols = None
        if expert_parameters(self._module):
            from torch.fx.experimental.symbolic_shapes import ShapeEnv

            symbols = ShapeEnv()
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols):
            state = fake_state(self._module)
            y = self.raw_output(
                [state[name] for name in self.parameters],
                [state[name] for name in self.buffers],
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu"),
            )
        return torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="meta")

    def _run_selectively(self, *arguments: object) -> Tensor:
        return checkpoint_selectively(
            self._call, *arguments, preserve_rng=self._draws_unkeyed is not False
        )

    def _call(
        self,
        weights: list[Tensor],
        buffers: list[Tensor],
        keys: DropoutKeys | None,
        x: Tensor,
        targets: Tensor | None,
        documents: Tensor | None,
        balance: Tensor | None,
    ) -> Tensor:
        tensors = dict(zip(self.parameters, weights, strict=True))
        tensors |= zip(self.buffers, buffers, strict=True)
        if keys is not None:
            tensors |= key_buffers(self._keyed, keys)
        if documents is not None:
            tensors |= dict.fromkeys(self._documents, documents)
        if balance is not None:
            tensors |= dict.fromkeys(self._balance, balance)
        if self._targets is not None and targets is not None:
            if not isinstance(self._loss, HeadLosses):
                return self._output({**tensors, self._targets: targets}, x)
            return self._loss(
                self._output({**tensors, self._targets: token_targets(targets)}, x), targets
            )
        output = self._output(tensors, x)
        if self._loss is None or targets is None:
            return output
        return self._loss(output, targets)

    def _output(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        for dropout in self._dropouts:
            dropout.begin_forward()
        output = functional_call(self._module, dict(tensors), (x,), tie_weights=self._has_ties)
        return output  # noqa: RET504  functional_call is untyped


def layer_templates(
    stack: LayerStack,
    *,
    compiled: bool,
    tp_rank: TensorParallelRank | None = None,
    experts: ExpertParallelRank | None = None,
    context: ContextParallelRank | None = None,
    sequence: int | None = None,
    loss: Literal["fused"] | None = None,
    attention: AttentionBackend | None = None,
    z_loss: float = 0.0,
    float8: bool = False,
) -> tuple[LayerTemplate, ...]:
    """The template of each layer; layers of one type share one.

    Args:
        loss: whether the last one fuses its loss with its projection to the vocabulary.
        attention: how they compute attention; None means `flash`.
        tp_rank: the tensor-parallel rank that computes; None for full layers.
        experts: the rank among those that divide experts; None for all experts.
        context: the rank among those that divide sequences; None for whole sequences.
        z_loss: factor of the mean of `log^2 Z`, whose gradient joins the loss's.
        float8: whether linear layers between the first and the last one multiply 8-bit factors.
    """
    last = len(stack.layers) - 1
    keys = [
        (kind, index == last, float8 and is_hidden(index, stack))
        for index, kind in enumerate(stack.kinds)
    ]
    templates: dict[tuple[str, bool, bool], LayerTemplate] = {}
    for index, key in enumerate(keys):
        if key not in templates:
            layer = stack.layers[index]
            if tp_rank is not None and tp_rank.degree > 1:
                layer = shard_layer(
                    layer, layer_sharding(stack, index), tp_rank, last=index == last
                )
            if experts is not None:
                layer = divide_experts(layer, experts)
            if context is not None and sequence is not None:
                layer = divide_sequence(layer, context, sequence)
            templates[key] = LayerTemplate(
                layer,
                last=index == last,
                compiled=compiled,
                fused=loss == "fused",
                attention=attention or "flash",
                z_loss=z_loss,
                float8=key[-1],
            )
    return tuple(templates[key] for key in keys)


def _use_sparse_gradients(layer: nn.Module) -> None:
    """Makes embeddings return gradients of only the rows that were looked up.

    If the embedding is tied to the head, whose dense gradient exists already, only those rows are
    touched then: a dense gradient of the table need not be allocated, cleared and added.
    """
    for module in layer.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True
