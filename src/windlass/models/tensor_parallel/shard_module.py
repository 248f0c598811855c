"""The layer that one tensor-parallel rank runs: a copy with its own shard of the parameters.

Between layers each rank holds its own tokens `[b s/t d]`, on which norms, dropout and residual sums
run (sequence parallelism). A *region*, attention or feed-forward, all-gathers the tokens, shards
features, and reduce-scatters the partial sums. Where ranks cannot share the tokens of an image
equally, zeros fill up the last ones; regions never see them. Sources: Shoeybi et al. 2019,
arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.

In a grid of r x c ranks each holds `[b s/r d/c]`, and the tokens of a region are gathered and
scattered within a column. Its column-parallel and row-parallel linears also communicate within a
row: the former reduce-scatters its outputs, `[b s f/t]`, the latter all-gathers its inputs. So each
rank has whole heads and f/t features between the two, as in one dimension; if heads do not divide
that far, the column-parallel linear all-reduces, and each rank has all f/r features of its row. A
`linear` outside of regions, as in BERT's head, takes the rank's features too, and reduce-scatters
its outputs. Source: Xu et al. 2021, GSPMD, arXiv:2105.04663, section 5.1.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from windlass.models.fine_tuning.lora import LoraLinear, RowLoraLinear
from windlass.models.init_weights import meta_copy, set_parameter
from windlass.models.loss import IGNORE_INDEX, set_layer_loss
from windlass.models.sentences import (
    ClassLoss,
    FirstTokens,
    HeadLosses,
    SentenceHead,
    first_places,
    has_sentence_head,
)
from windlass.models.tensor_parallel.collectives import (
    FeatureSplit,
    TensorParallelRank,
    all_gather_autograd,
    all_reduce_autograd,
)
from windlass.models.tensor_parallel.norms import (
    ShardedZeroCenteredRMSNorm,
    ZeroCenteredRMSNorm,
)
from windlass.models.tensor_parallel.parallel_modules import (
    GatherTokens,
    GridColumnLinear,
    GridLinear,
    KeepLocalPart,
    RowLinear,
    SampleShard,
    ScatterTokens,
    ScoreLinear,
    ShardedDropout,
    ShardedLayerNorm,
    ShardedRMSNorm,
    TensorParallelLoss,
    VocabParallelEmbedding,
    VocabParallelLinear,
    VocabParallelLora,
)
from windlass.models.tensor_parallel.shard_params import (
    EqualShard,
    ParamShard,
    inner_shard,
    param_shards,
    sharded_norm_paths,
)
from windlass.models.tensor_parallel.sharding_rules import (
    REGION_STYLES,
    GridShardable,
    LayerSharding,
    ShardingRule,
    ShardingStyle,
)
from windlass.models.tensor_parallel.sparse_shards import (
    SparseShard,
    is_sparse,
    shard_sparse_module,
)

_SHARDED_LINEARS: dict[ShardingStyle, type[nn.Linear]] = {
    "column": GridColumnLinear,
    "row": RowLinear,
    "vocabulary": VocabParallelLinear,
}
_GRID_LINEARS: dict[ShardingStyle, type[nn.Linear]] = {"linear": GridLinear, "scores": ScoreLinear}
"""Linears that a grid alone changes."""


def shard_layer(
    layer: nn.Module, sharding: LayerSharding, tp_rank: TensorParallelRank, *, last: bool
) -> nn.Module:
    """A copy of a layer on the meta device, as one rank runs it.

    It has the parameters of `param_shards`, by the same names. The first layer takes all tokens;
    every other takes and gives `[b s/r d/c]`; the last gives what `layer_loss` of the copy takes.
    Ranks differ only in their weights and in their shard of an uneven vocabulary, of which the
    first rank's is the largest.

    Args:
        layer: the full layer, on any device, for which `sharding_errors` is empty; not changed.
        tp_rank: the rank. Its process groups are looked up only when the tensors are real.
    """
    local = meta_copy(layer)
    if "token_ranks" in vars(local):  # positions around the block are those of all tokens
        vars(local)["token_ranks"] = tp_rank.rows
    shards = param_shards(layer, sharding, tp_rank)
    _replace_parameters(local, shards)
    for path, rule in sharding.rules.items():
        if rule.style in REGION_STYLES:
            is_whole = rule.style == "whole"
            _exchange_tokens(local.get_submodule(path), tp_rank, sharding.positions, is_whole)
        else:
            shard = inner_shard(layer, sharding, path, tp_rank)
            _shard_submodule(local, path, rule, tp_rank, shard)
            _exchange_features(local, path, sharding, tp_rank)
    if tp_rank.columns > 1:
        for path in sharded_norm_paths(layer, sharding):
            norm = local.get_submodule(path)
            _change_class(norm, _sharded_norm(norm), tp_rank=tp_rank)
    _shard_dropouts(local, layer, sharding, tp_rank)
    if sharding.is_first:
        local.register_forward_hook(KeepLocalPart(tp_rank))
    if last:
        first_column = _first_logit_column(layer, sharding, shards)
        _set_loss(local, TensorParallelLoss(tp_rank=tp_rank, first_column=first_column))
    return local


def _set_loss(local: nn.Module, loss: TensorParallelLoss) -> None:
    """Attaches the loss of the last layer; what is said of first tokens, every rank computes."""
    first_tokens = [module for module in local.modules() if isinstance(module, FirstTokens)]
    for module in first_tokens:
        _change_class(module, ExchangedFirstTokens, tp_rank=loss.tp_rank)
    degree = loss.tp_rank.degree
    if has_sentence_head(local):
        set_layer_loss(local, HeadLosses(tokens=loss, ignored=IGNORE_INDEX, ranks=degree))
    elif first_tokens:
        set_layer_loss(local, ClassLoss(ignored=IGNORE_INDEX, ranks=degree))
    else:
        set_layer_loss(local, loss)


def _replace_parameters(local: nn.Module, shards: dict[str, ParamShard]) -> None:
    """Gives a layer parameters of its shards' shapes; shared parameters stay shared."""
    full = dict(local.named_parameters(remove_duplicate=False))
    new: dict[int, nn.Parameter] = {}
    for name, shard in shards.items():
        old = full[name]
        if id(old) not in new:
            data = torch.empty(shard.shape, dtype=old.dtype, device="meta")
            new[id(old)] = nn.Parameter(data, requires_grad=old.requires_grad)
        set_parameter(local, name, new[id(old)])


def _exchange_tokens(
    region: nn.Module,
    tp_rank: TensorParallelRank,
    positions: int | None,
    is_whole: bool,
) -> None:
    """Gives a region the tokens of all ranks, and this rank its own of what the region gives."""
    region.register_forward_pre_hook(GatherTokens(tp_rank, positions), with_kwargs=True)
    region.register_forward_hook(KeepLocalPart(tp_rank) if is_whole else ScatterTokens(tp_rank))


def _exchange_features(
    local: nn.Module, path: str, sharding: LayerSharding, tp_rank: TensorParallelRank
) -> None:
    """Lets a column, a row or experts take and give what the code around them has."""
    rule, region, group = sharding.rules[path], sharding.enclosing_region(path), tp_rank.all_group
    if rule.is_apart and rule.style == "column":
        features = replace(group, rows=1, columns=group.degree)
        local.get_submodule(path).register_forward_hook(
            lambda _, __, y: all_gather_autograd(y, features)
        )
    elif rule.is_apart:
        local.get_submodule(path).register_forward_pre_hook(
            lambda _, args: args[0].chunk(group.degree, -1)[tp_rank.index]
        )
    is_partial = rule.style in ("row", "experts")
    if is_partial and region is not None and sharding.rules[region].style == "whole":
        local.get_submodule(path).register_forward_hook(
            lambda _, __, y: all_reduce_autograd(y, group)
        )


def _shard_submodule(
    local: nn.Module, path: str, rule: ShardingRule, tp_rank: TensorParallelRank, shard: EqualShard
) -> None:
    """Makes one module or setting of a layer work on the rank's shard."""
    if rule.style == "count":
        owner, _, name = path.rpartition(".")
        module = local.get_submodule(owner)
        setattr(module, name, getattr(module, name) // shard.total)
        return
    module = local.get_submodule(path)
    if is_sparse(module) and rule.style in ("column", "row"):
        shard_sparse_module(module, SparseShard(rule, shard.number, shard.total))
    elif isinstance(module, nn.Embedding) and rule.style == "vocabulary":
        _shard_embedding(module, rule, tp_rank)
    elif isinstance(module, GridShardable) and tp_rank.columns > 1:
        is_sharded = shard.total == tp_rank.degree
        new_class = module.grid_class(rule.style)
        _change_class(module, new_class, tp_rank=tp_rank, is_sharded=is_sharded)
    elif isinstance(module, nn.Linear):
        _shard_linear(module, rule, tp_rank, shard)


def _shard_linear(
    module: nn.Linear, rule: ShardingRule, tp_rank: TensorParallelRank, shard: EqualShard
) -> None:
    if rule.style in _GRID_LINEARS:
        if tp_rank.columns > 1:
            module.in_features = module.weight.shape[1]
            _change_class(module, _GRID_LINEARS[rule.style], tp_rank=tp_rank)
    elif rule.style in _SHARDED_LINEARS:
        module.out_features, module.in_features = module.weight.shape
        if rule.style != "vocabulary" and tp_rank.columns == 1:
            side: Literal["inputs", "outputs"] = "inputs" if rule.style == "row" else "outputs"
            vars(module)["split"] = FeatureSplit(side=side, group=tp_rank.all_group)
        if isinstance(module, LoraLinear):
            if rule.style == "row":
                _change_class(module, RowLoraLinear, ranks=tp_rank.degree)
            elif rule.style == "vocabulary":
                _change_class(module, VocabParallelLora, tp_rank=tp_rank)
        elif rule.style != "column" or tp_rank.columns > 1:
            is_sharded = shard.total == tp_rank.degree
            new_class = _SHARDED_LINEARS[rule.style]
            _change_class(module, new_class, tp_rank=tp_rank, is_sharded=is_sharded)


def _shard_embedding(
    embedding: nn.Embedding, rule: ShardingRule, tp_rank: TensorParallelRank
) -> None:
    start, stop = rule.ranges(embedding.num_embeddings, tp_rank.degree, tp_rank.index)[0]
    padding = embedding.padding_idx
    if padding is not None:
        embedding.padding_idx = padding - start if start <= padding < stop else None
    embedding.num_embeddings = stop - start
    _change_class(embedding, VocabParallelEmbedding, tp_rank=tp_rank, first_row=start)


def _change_class(module: nn.Module, new_class: type[nn.Module], **attributes: object) -> None:
    """Changes the class of a module and adds attributes.

    So its parameters keep their names and its hooks stay, wherever it stands in the layer.
    """
    module.__class__ = new_class
    vars(module).update(attributes)


def _sharded_norm(norm: nn.Module) -> type[nn.Module]:
    if isinstance(norm, nn.LayerNorm):
        return ShardedLayerNorm
    is_centered = isinstance(norm, ZeroCenteredRMSNorm)
    return ShardedZeroCenteredRMSNorm if is_centered else ShardedRMSNorm


def _shard_dropouts(
    local: nn.Module, layer: nn.Module, sharding: LayerSharding, tp_rank: TensorParallelRank
) -> None:
    """Tells each dropout which part of a sample it sees, if that is not all of it."""
    parents = {
        f"{path}.{name}" if path else name: parent
        for path, parent in local.named_modules()
        for name, _ in parent.named_children()
    }
    for path, module in local.named_modules():
        is_whole = sharding.is_first or isinstance(parents.get(path), SentenceHead)
        if type(module) is nn.Dropout and module.p > 0 and not is_whole:
            shard = _dropout_shard(layer, path, sharding, tp_rank)
            if shard != SampleShard():
                _change_class(module, ShardedDropout, shard=shard)


def _dropout_shard(
    layer: nn.Module, path: str, sharding: LayerSharding, tp_rank: TensorParallelRank
) -> SampleShard:
    """What a dropout sees: all tokens inside a region, the rank's tokens elsewhere."""
    rule = sharding.rules.get(path)
    if rule is not None and rule.style == "sharded":
        return SampleShard(features=inner_shard(layer, sharding, path, tp_rank))
    around = sharding.rules.get(path.rpartition(".")[0])
    if around is not None and around.style == "vocabulary":  # it has gathered all tokens
        return SampleShard()
    in_region = sharding.enclosing_region(path) is not None
    return SampleShard(
        tokens=(EqualShard() if in_region else EqualShard(tp_rank.row, tp_rank.rows),),
        features=EqualShard(tp_rank.column, tp_rank.columns),
    )


def _first_logit_column(
    layer: nn.Module, sharding: LayerSharding, shards: dict[str, ParamShard]
) -> int | None:
    """First column of the logits that the rank has; None if it has all of them."""
    for path, rule in sharding.rules.items():
        if rule.style == "vocabulary" and isinstance(layer.get_submodule(path), nn.Linear):
            ranges = shards[f"{path}.weight" if path else "weight"].ranges[0]
            return ranges[0][0] if ranges else None
    return None


class ExchangedFirstTokens(FirstTokens):
    """First tokens of rows of which a rank has some of the tokens.

    The ranks exchange these vectors alone, and all compute the same of them; the loss gives each an
    equal part of the gradient.
    """

    tp_rank: TensorParallelRank

    def forward(self, x: Tensor) -> Tensor:
        """Maps the rank's tokens, `[b s/t d]`, to `[b p d]`."""
        count = x.shape[1]
        if self.documents is None:
            places = torch.zeros((len(x), 1), dtype=torch.int64, device=x.device)
        else:
            places = first_places(self.documents)
        places = places - self.tp_rank.row * count
        on_other_rank = ((places < 0) | (places >= count)).unsqueeze(-1)
        index = places.unsqueeze(-1).masked_fill(on_other_rank, 0).expand(-1, -1, x.shape[-1])
        vectors = x.gather(1, index).masked_fill(on_other_rank, 0)
        return all_reduce_autograd(vectors, self.tp_rank.all_group)
