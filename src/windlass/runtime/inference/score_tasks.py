"""How likely the ranks of a plan find choices, which they answer together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.data import ChoiceLikelihood, EncodedChoice
from windlass.runtime.distributed.p2p import output_shapes
from windlass.runtime.inference.rank_passes import RankPasses
from windlass.runtime.inference.score import ChoiceBatches


def likelihoods_on_ranks(
    passes: RankPasses, choices: Sequence[EncodedChoice]
) -> list[ChoiceLikelihood]:
    """The likelihood of each choice, the same on all ranks.

    Each replica takes its part of the batches, also one that has a part of each sequence in
    training, and batches are no larger than there. Likelihoods are those of the precision that the
    run computes in.
    """
    batch, parallel = passes.context.plan.batch, passes.context.plan.parallel
    batches = ChoiceBatches(
        choices,
        passes.context.stack.max_sequence,
        batch_tokens=batch.micro * batch.sequence,
        multiple=int(parallel.tensor),
    )
    # Replicas that divide experts wait for each other in each pass, so that all take all batches.
    parts = 1 if parallel.expert else parallel.replicas
    mine = range(passes.dist.coord.data_rank % parts, len(batches), parts)
    return _likelihoods(passes, batches, mine, len(choices))


def _likelihoods(
    passes: RankPasses, batches: ChoiceBatches, mine: Sequence[int], count: int
) -> list[ChoiceLikelihood]:
    """The likelihood of each choice, from the batches of all ranks.

    Args:
        batches: the batches of all data-parallel ranks.
        count: number of choices.
    """
    store, templates = passes.store, passes.whole_templates
    values = [passes.context.device.to_device(batches.inputs(batch)) for batch in mine]
    shapes: dict[torch.Size, tuple[torch.Size, ...]] = {}
    sizes = [x.shape for x in values]

    def shape(layer: int, index: int) -> torch.Size:
        size = sizes[index]
        if size not in shapes:
            on_meta = torch.zeros(size, dtype=torch.int64, device="meta")
            shapes[size] = output_shapes(templates, on_meta)
        return shapes[size][layer]

    rows: dict[int, ChoiceLikelihood] = {}

    def output(layers: range, index: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in layers:
                store.wait_for_layer(layer)
                tensors = store.layers[layer]
                x = templates[layer].raw_output(tensors.weights, tensors.buffers, x)
            if layers.stop < len(templates):
                return x
            template = templates[-1]
            predictions = batches.predictions(mine[index], template.logits_of_all_tokens(x))
            predictions = template.logits_of_all_columns(predictions)
        rows.update(batches.likelihoods(mine[index], predictions))
        # Nothing follows, and the logits of all batches would not fit.
        return x.new_empty(0)

    has_logits = passes.run(values, output, shape)
    # All tensor-parallel ranks of the last layer have the same, and so have replicas that divide
    # experts; the first one counts.
    coord, expert = passes.dist.coord, passes.context.plan.parallel.expert
    is_first = not coord.tensor_rank and not (expert and coord.data_rank)
    known = rows if has_logits and is_first else {}
    sums = [0.0] * (2 * count)
    for index, likelihood in known.items():
        sums[2 * index : 2 * index + 2] = likelihood.nats, float(likelihood.is_greedy)
    sums = passes.dist.all_reduce_sum(sums)
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return [ChoiceLikelihood(nats, bool(is_greedy)) for nats, is_greedy in pairs]
