"""ComputeHandlers: the handlers that compute one step: forward, backward, norm and update."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from windlass.data import ReadAhead, TrainingBatches, batch_of_step
from windlass.errors import RunBroken
from windlass.program import selective_layers
from windlass.runtime.distributed.process_groups import DistContext
from windlass.runtime.expert_load import ExpertLoad
from windlass.runtime.interpreter import Handlers
from windlass.runtime.keyed_dropout import DropoutKeys, generator_seed, layer_key, sample_keys
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.offload.activations import ActivationOffloader
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import ParamStore
from windlass.runtime.parameters import DTYPES, add_gradients, master_dtype
from windlass.runtime.rank_context import RankContext
from windlass.runtime.split_backward import backward_input, backward_weight
from windlass.runtime.step_state import LossScale, StepState, stacked

_NAMED_DOCUMENTS = 8
"""Most documents that the message about a broken step names."""

_COMPILED_KINDS = ("load_batch", "forward", "recompute", "backward")
"""Instruction kinds that `warm_up` runs."""


class StopRequested(Exception):  # noqa: N818  a request, not an error
    """The user asked to stop; no weight has changed in this step."""


class ComputeHandlers:
    """The compute handlers of one rank, with the tensors they hold while a step runs.

    Args:
        context: the rank's plan, program and device.
        store: weights and optimizer state.
        templates: one template per layer.
        optimizer: updates the weights.
        batches: provides the tokens of a micro-batch.
        stop: asked before each micro-batch; with several ranks, at the end of a step.
        dist: the ranks of the run.
        activations: offloads layer outputs; None if they stay in device memory.
    """

    def __init__(
        self,
        context: RankContext,
        store: ParamStore,
        templates: tuple[LayerTemplate, ...],
        *,
        optimizer: Optimizer,
        batches: TrainingBatches,
        stop: Callable[[], bool],
        dist: DistContext,
        activations: ActivationOffloader | None = None,
    ) -> None:
        plan, program, device = context.plan, context.program, context.device.torch_device
        self._micro = plan.batch.micro
        self._replica_samples = plan.batch.sequences_per_replica
        self.first_sample = dist.coord.data_rank * self._replica_samples
        """Index of this data-parallel rank's first sample in the global batch."""
        self._accumulates = plan.batch.accumulation > 1
        self._store = store
        self._activations = activations
        self._layers = layers = store.layers
        self._templates = templates
        self._last = len(layers) - 1
        self._embeds = any(i.kind == "forward" and i.layer == 0 for i in program.instructions)
        self._dist = dist
        self._clips = any(instruction.kind == "grad_norm" for instruction in program.instructions)
        self._optimizer = optimizer
        self._batches, self._skip_batches = batches, context.settings.skip_batches
        self._reader = ReadAhead(
            batches, first=self.first_sample, micro=self._micro, count=plan.batch.accumulation
        )
        self._seed = context.seed
        self._device = context.device
        self._stop = stop
        self.recomputed_layers = frozenset(
            i.layer for i in program.instructions if i.kind == "recompute" and i.layer is not None
        )
        """Layers whose forward pass runs again right before their backward pass."""
        self.no_grad_layers = frozenset(
            layer for layer in self.recomputed_layers if not templates[layer].compiled
        )
        """Recomputed layers whose first forward pass runs without autograd. Compiled layers are
        excluded: without autograd torch compiles other code, which fuses and so rounds differently.
        Their autograd graph is built and dropped instead."""
        self._selective = selective_layers(plan)
        self._first_micro_batch = tuple(
            i for i in program.instructions if i.micro_batch == 0 and i.kind in _COMPILED_KINDS
        )
        scales = plan.precision == "float16"
        self.loss_scale = LossScale.of(context.settings.loss_scale) if scales else None
        """What losses are multiplied by in the backward passes; None in other precisions."""
        self._weighed: tuple[tuple[float, ...], float] = ((), 1.0)
        """What `loss_weights` are of: shares of the targets, and the loss scale."""
        self._weights_dtype, self._dtype = master_dtype(plan.precision), DTYPES[plan.precision]
        self._active = torch.ones((), dtype=torch.int64, device=device)
        self._warms_up = False
        computed = frozenset(i.layer for i in program.instructions if i.kind == "forward")
        counts = dist.coord.tensor_rank == 0
        self.experts = ExpertLoad(layers, templates, computed, counts=counts)
        """Which experts the tokens of the step took."""
        self._sequences = self._replica_samples * plan.parallel.data
        self._tensor_ranks = int(plan.parallel.tensor)
        self._layer_keys = [layer_key(layer.name).to(device) for layer in layers]
        self.begin_step(1)

    def begin_step(self, step: int) -> None:
        """Drops everything of the previous step and begins `step`, counted from 1."""
        self.step = step
        """The step that runs, counted from 1."""
        self.batch = batch_of_step(step, self._skip_batches)
        """The number of the batch that it takes."""
        self._store.begin_step(step)
        self._weigh_losses()
        if self._activations is not None:
            self._activations.begin_step()
        self.state = StepState()
        self._norm: float | None = None
        self._loss = math.nan
        self.experts.begin_step()
        self.should_stop = False
        """Whether any rank asked to stop, known to all ranks at the end of the step."""
        self._norms: list[Tensor] = []
        self._clip_divisor: Tensor | None = None
        for layer in self._layers:
            for weight in (*layer.owned, *layer.used):
                weight.clear_gradient()

    def _weigh_losses(self) -> None:
        """Counts the targets of the global batch, of which every rank knows all samples.

        A micro-batch's loss is a mean over its own targets. It is weighted with their share of all
        targets, so that the sum over all micro-batches and ranks is a mean over all targets.
        """
        counts = self._batches.target_counts(self.batch)
        end = self.first_sample + self._replica_samples
        own = counts[self.first_sample : end].reshape(-1, self._micro)
        total = int(counts.sum())
        if not total:
            raise RunBroken(
                f"none of the {len(counts)} samples of step {self.step} has a target, so no loss; "
                "raise `train.batch`, or leave out examples without targets"
            )
        shares = tuple(int(count) / total for count in own.sum(axis=1))
        if (shares, self._scale) != self._weighed:
            self._weighed = (shares, self._scale)
            wide = torch.float64 if self._device.has_float64 else torch.float32
            weights = torch.tensor(shares, dtype=torch.float64)
            self._wide_weights = self._device.to_device(weights.to(wide))
            scaled = (self._scale * weights).to(self._weights_dtype)
            self.loss_weights = self._device.to_device(scaled)
            """`Float[micro_batch]`: weight of each loss, by which backward passes begin."""
            # Each tensor-parallel rank computes a part of every gradient.
            balance = self._scale / (self._sequences * self._tensor_ranks)
            self._balance = self._device.to_device(torch.tensor(balance, dtype=wide))
            """`Float[]`: weight of one sequence's balance loss."""

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def close(self) -> None:
        """Ends the thread that reads micro-batches."""
        self._reader.close()

    def warm_up(self, step: int) -> None:
        """Runs the passes of one micro-batch and discards them, so that all code is compiled."""
        self.begin_step(step)
        self._warms_up = True
        handlers = self.handlers()
        for kind, layer, micro in self._first_micro_batch:
            if layer is not None:
                self._store.load_layers((layer,))
            handlers[kind](layer or 0, micro or 0)
            recomputed = kind == "forward" and layer in self.recomputed_layers
            if layer is not None and (kind == "backward" or recomputed):
                self._store.free_layers((layer,))
        self._warms_up = False
        self.begin_step(step)

    def handlers(self) -> Handlers:
        """The handler of each instruction kind that needs no other pipeline stage."""
        return {
            "load_batch": self._load_batch,
            "forward": self._forward,
            "recompute": self._recompute,
            "backward": self._backward,
            "backward_input": self._backward_input,
            "backward_weight": self._backward_weight,
            "grad_norm": self._grad_norm,
            "update": self._update,
            "sync": self._sync,
            **self._store.handlers(),
            **({} if self._activations is None else self._offload_handlers(self._activations)),
        }

    def _offload_handlers(self, activations: ActivationOffloader) -> Handlers:
        def offload(layer: int, micro: int) -> None:
            activations.offload(layer, micro, self.state.outputs.pop((layer, micro)))

        def reload(layer: int, micro: int) -> None:
            self.state.outputs[layer, micro] = activations.reload(layer, micro)

        return {"offload_activation": offload, "reload_activation": reload}

    @property
    def loss(self) -> float:
        """Mean loss over the targets of the step on all ranks, in nats per token."""
        return self._loss

    @property
    def gradient_norm(self) -> float:
        """2-norm over all gradients of the step, before clipping; NaN for a skipped step."""
        return math.nan if self._norm is None else self._norm

    def _load_batch(self, _: int, micro: int) -> None:
        if self._dist.world_size == 1 and self._stop():
            raise StopRequested
        inputs, targets = self._reader.read(self.batch, micro)
        if not self._weighed[0][micro]:
            # A mean over no target is no number: one counts, with a weight of 0.
            targets = targets.copy()
            targets.flat[: targets.shape[-1] if targets.dtype.kind == "f" else 1] = 0
        self.state.tokens[micro] = (self._inputs(inputs), self._to_device(targets))

    def _inputs(self, inputs: object) -> Tensor:
        """Token ids, or numbers in the type that layers compute with, on the device."""
        tensor = torch.as_tensor(inputs)
        return self._to_device(tensor.to(self._dtype) if tensor.is_floating_point() else tensor)

    def micro_batch_start(self, micro: int) -> int:
        """Index of a micro-batch's first sample in the global batch."""
        return self.first_sample + micro * self._micro

    def _to_device(self, tokens: object) -> Tensor:
        return self._device.to_device(torch.as_tensor(tokens))

    def _forward(self, layer: int, micro: int) -> None:
        if layer in self.no_grad_layers:
            with torch.no_grad():
                output = self._call(layer, micro, self._input(layer, micro))
            self.state.outputs[layer, micro] = output
            return
        output = self._forward_with_grad(layer, micro)
        if layer in self.recomputed_layers:
            del self.state.autograd_graphs[layer, micro]
        if layer == self._last:
            self.state.losses[micro] = output.detach()
        else:
            self.state.outputs[layer, micro] = output.detach()

    def _recompute(self, layer: int, micro: int) -> None:
        self._forward_with_grad(layer, micro, repeats=True)

    def _backward(self, layer: int, micro: int) -> None:
        x, output = self.state.autograd_graphs.pop((layer, micro))
        trained = self._layers[layer].trained
        wanted = self._leaves(layer)
        gradient = self._output_gradient(layer, micro)
        self._free_input(layer, micro)
        if layer > 0:
            wanted.append(x)
        if not output.requires_grad:
            return  # all of the first layer is frozen
        gradients: list[Tensor | None] = list(
            torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        )
        # Memory peaks here, so nothing of the forward pass may outlive its backward pass.
        del x, output, gradient, wanted
        if layer > 0:
            self._pass_to_previous(layer, micro, gradients.pop())
        self.state.add_scores(layer, gradients[len(trained) :])
        del gradients[len(trained) :]
        add_gradients(trained, gradients, accumulated=self._accumulates)

    def _backward_input(self, layer: int, micro: int) -> None:
        if layer == 0:
            return  # its input needs no gradient: the weight-gradient pass does all
        x, output = self.state.autograd_graphs[layer, micro]
        gradient = self._output_gradient(layer, micro)
        input_gradient, deferred = backward_input(x, output, gradient, self._leaves(layer))
        self.state.deferred_weight_grads[layer, micro] = deferred
        self._pass_to_previous(layer, micro, input_gradient)

    def _backward_weight(self, layer: int, micro: int) -> None:
        if layer == 0:
            self._backward(layer, micro)
            return
        del self.state.autograd_graphs[layer, micro]
        self._free_input(layer, micro)
        trained = self._layers[layer].trained
        deferred = self.state.deferred_weight_grads.pop((layer, micro))
        gradients = backward_weight(self._leaves(layer), deferred)
        self.state.add_scores(layer, gradients[len(trained) :])
        del gradients[len(trained) :]
        add_gradients(trained, gradients, accumulated=self._accumulates)

    def _leaves(self, layer: int) -> list[Tensor]:
        """The trained weights of a layer, and what gives the scores of absent blocks."""
        weights = [weight.working for weight in self._layers[layer].trained]
        return [*weights, *self._templates[layer].score_leaves]

    def _output_gradient(self, layer: int, micro: int) -> Tensor:
        if layer == self._last:
            return self.loss_weights[micro]
        return self.state.gradients.pop((layer, micro))

    def _free_input(self, layer: int, micro: int) -> None:
        """Frees what only the backward pass of a layer still needed."""
        if layer > 0:
            del self.state.outputs[layer - 1, micro]
        if layer == 0 or (layer == self._last and not self._embeds):
            del self.state.tokens[micro]

    def _pass_to_previous(self, layer: int, micro: int, gradient: Tensor | None) -> None:
        """Stores the gradient of a layer's input for the previous layer."""
        if gradient is not None:
            self.state.gradients[layer - 1, micro] = gradient

    def _grad_norm(self, _: int, __: int) -> None:
        norm = self._optimizer.combine_norms(self._gradient_norms())
        # Waits for the device once a step: a broken gradient must not change any weight.
        self._reduce_results([norm])
        overflowed = not math.isfinite(self.gradient_norm)
        if overflowed:
            self._skip_update()
        self._clip_divisor = self._optimizer.clip_divisor(
            0.0 if overflowed else self.gradient_norm, scale=self._scale
        )
        self._store.finish_backward(self._clip_divisor)
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after_step(overflowed=overflowed)

    def _skip_update(self) -> None:
        """Drops the gradients of a step that overflowed by its loss scale, as all ranks do."""
        if self.loss_scale is None:
            self._raise_not_finite()
            return
        scale = self.loss_scale
        if scale.is_fixed or scale.scale <= 1:
            way_out = "lower it or leave it out" if scale.is_fixed else "train in bfloat16"
            raise RunBroken(
                f"gradients overflow float16 at step {self.step} with `train.loss_scale` = "
                f"{scale.scale:g}; {way_out}"
            )
        self._norm = math.nan
        self._store.drop_gradients()

    def _gradient_norms(self) -> list[Tensor]:
        """2-norms of parts of all gradients that this rank updates, layer by layer."""
        offloaded = self._store.offloaded_grad_norms
        layers = [
            () if layer in offloaded else self._store.grads_for_norm(layer)
            for layer in range(len(self._layers))
        ]
        norms = self._optimizer.gradient_norms_by_layer(layers)
        return [norm for layer, own in enumerate(norms) for norm in offloaded.get(layer, own)]

    def _update(self, layer: int, _: int) -> None:
        if not self._clips:
            if not self._norms:
                self._require_finite_losses()
            weights = self._store.grads_for_norm(layer)
            self._norms.append(self._optimizer.gradient_norm(weights))
        self._store.update(layer, self.step, self._clip_divisor)

    def _sync(self, _: int, __: int) -> None:
        """Reduces loss and norm over all ranks, unless `grad_norm` has done so."""
        if self._norm is None:
            self._reduce_results(self._norms)

    def _reduce_results(self, norms: Sequence[Tensor]) -> None:
        """Sums loss, norm and requests to stop over all ranks; the host waits for all at once.

        Args:
            norms: 2-norms of the gradients that this rank updates, `Float[]` each.
        """
        totals = self.state.totals(norms, self._wide_weights)
        square, loss, all_finite = totals.cpu().tolist()
        if not all_finite:
            self._require_finite_losses()
        # All tensor-parallel ranks have the same loss, and one copy of each shard counts.
        own_loss = 0.0 if self._dist.coord.tensor_rank else loss
        stop = self._dist.world_size > 1 and self._stop()
        own_square = square if self._store.counts_in_norm else 0.0
        local = (own_square, own_loss, float(stop), *self.experts.counts())
        total, self._loss, stops, *loads = self._dist.all_reduce_sum(local)
        self.experts.end_step(loads)
        self._norm, self.should_stop = math.sqrt(total) / self._scale, stops > 0

    def _input(self, layer: int, micro: int) -> Tensor:
        if layer == 0:
            return self.state.tokens[micro][0]
        if self._activations is not None:
            self._activations.wait_for(layer - 1, micro)
        return self.state.outputs[layer - 1, micro]

    def _forward_with_grad(self, layer: int, micro: int, *, repeats: bool = False) -> Tensor:
        """The output of a forward pass that builds the autograd graph for its backward pass."""
        x = self._input(layer, micro)
        if layer > 0:
            x = x.detach().requires_grad_()
        output = self._call(layer, micro, x, repeats=repeats)
        self.state.autograd_graphs[layer, micro] = (x, output)
        return output

    def _call(self, layer: int, micro: int, x: Tensor, *, repeats: bool = False) -> Tensor:
        """The output of a layer; running statistics count a pass that repeats another one once."""
        self._store.wait_for_layer(layer)
        tensors, template = self._layers[layer], self._templates[layer]
        targets = self.state.tokens[micro][1] if layer == self._last else None
        keys = None
        if template.has_dropout:
            keys = DropoutKeys(
                samples=self._sample_keys(micro), layer=self._layer_keys[layer],
                active=self._active,
            )  # fmt: skip
        seed = generator_seed(self._seed, self.step, layer, self.micro_batch_start(micro))
        buffers = tensors.buffers
        if template.has_running_statistics and (repeats or self._warms_up):
            buffers = template.discarded_buffers(buffers)
        documents = self._documents_of(micro) if template.takes_documents else None
        balance = self._balance if template.takes_balance else None
        return template(
            tensors.weights, buffers, keys, x, targets, documents, balance, seed=seed,
            selective=layer in self._selective,
        )  # fmt: skip

    def _sample_keys(self, micro: int) -> Tensor:
        """`Int64[b]`: dropout keys of a micro-batch's samples, computed once a step."""
        if micro not in self.state.dropout_keys:
            keys = sample_keys(self._seed, self.step, self.micro_batch_start(micro), self._micro)
            self.state.dropout_keys[micro] = self._device.to_device(keys)
        return self.state.dropout_keys[micro]

    def _documents_of(self, micro: int) -> Tensor | None:
        """`Int[b s]`: the document of each token of a micro-batch; None if a row is one document.

        Each pipeline stage reads them itself, once a step, as all know the samples.
        """
        if micro not in self.state.documents:
            start = self.micro_batch_start(micro)
            ids = self._batches.document_ids(self.step, start, self._micro)
            self.state.documents[micro] = None if ids is None else self._to_device(ids)
        return self.state.documents[micro]

    def _require_finite_losses(self) -> None:
        device = self._device.torch_device
        losses = stacked(self.state.losses.values(), torch.float32, device).cpu().tolist()
        for micro, loss in zip(self.state.losses, losses, strict=True):
            if not math.isfinite(loss):
                first = self.micro_batch_start(micro)
                samples = range(first, first + self._micro)
                raise RunBroken(
                    f"the loss is {loss} at step {self.step}, micro-batch {micro}, over "
                    f"samples {first} to {first + self._micro - 1} from "
                    f"{self._documents(samples)}"
                )

    def _raise_not_finite(self) -> None:
        names = [
            weight.name
            for layer in range(len(self._layers))
            for weight in self._store.grads_for_norm(layer)
            if not math.isfinite(float(self._optimizer.gradient_norm([weight])))
        ]
        count = self._micro * len(self.state.losses)
        samples = range(self.first_sample, self.first_sample + count)
        raise RunBroken(
            f"the gradient of `{names[0]}` and {len(names) - 1} others is not finite at step "
            f"{self.step}, although its losses are, over samples from {self._documents(samples)}"
            if names
            else f"the gradient norm overflows float32 at step {self.step}"
        )

    def _documents(self, samples: Iterable[int]) -> str:
        """Names of the documents that samples of this step contain."""
        by_sample = (self._batches.document_names(self.batch, sample) for sample in samples)
        names = list(dict.fromkeys(name for documents in by_sample for name in documents))
        shown = ", ".join(f"`{name}`" for name in names[:_NAMED_DOCUMENTS])
        more = len(names) - _NAMED_DOCUMENTS
        return f"{shown} and {more} more" if more > 0 else shown
