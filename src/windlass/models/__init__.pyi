from .build import (
    build_layer_stack as build_layer_stack,
)
from .catalog import (
    is_causal as is_causal,
    model_config as model_config,
    model_names as model_names,
    published_parameter_count as published_parameter_count,
)
from .check_shardable import (
    sharding_errors as sharding_errors,
)
from .config import (
    TransformerConfig as TransformerConfig,
)
from .init_weights import (
    meta_copy as meta_copy,
)
from .layer_kinds import (
    is_embedding_only as is_embedding_only,
)
from .layer_stack import (
    LayerStack as LayerStack,
    layer_sharding as layer_sharding,
    materialize_layer as materialize_layer,
)
from .loss import (
    IGNORE_INDEX as IGNORE_INDEX,
    layer_loss as layer_loss,
)
from .selective_checkpoint import (
    checkpoint_selectively as checkpoint_selectively,
)
from .shape_inference import (
    fake_state as fake_state,
)
from .tensor_parallel.collectives import (
    TensorParallelRank as TensorParallelRank,
    all_gather as all_gather,
    reduce_scatter as reduce_scatter,
)
from .tensor_parallel.parallel_modules import (
    SampleShard as SampleShard,
    ShardedDropout as ShardedDropout,
)
from .tensor_parallel.shard_module import (
    shard_layer as shard_layer,
)
from .tensor_parallel.shard_params import (
    ParamShard as ParamShard,
    param_shards as param_shards,
)
