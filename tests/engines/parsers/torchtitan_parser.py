"""Parses the words of files by torchtitan's own parser, in torchtitan's environment."""

import importlib
import importlib.machinery
import json
import sys
import types
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
import torch.utils._triton  # noqa: F401  asks for triton before the stand-in


class _Missing(types.ModuleType):
    """Stands for triton, which torchtitan's models import and its parser does not need."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("jit", "autotune", "heuristics"):
            return lambda *words, **_: words[0] if words and callable(words[0]) else lambda f: f
        return _Missing(name)

    def __call__(self, *_, **__):
        return _Missing("value")


for name in ("triton", "triton.language"):
    sys.modules[name] = _Missing(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
importlib.import_module("torchtitan.distributed.minimal_async_ep.kernels")
for name in ("triton", "triton.language"):
    del sys.modules[name]

from torchtitan.config import ConfigManager

for path in sys.argv[1:]:
    config = ConfigManager().parse_args(Path(path).read_text().splitlines())
    parallel, training = config.parallelism, config.training
    print(
        "PARSED",
        json.dumps(
            {
                "parallel.tensor": parallel.tensor_parallel_degree,
                "parallel.pipeline": parallel.pipeline_parallel_degree,
                "sharding.shard": parallel.data_parallel_shard_degree,
                "batch.sequence": training.seq_len,
                "batch.global": training.global_batch_size,
                "recompute": type(config.activation_checkpoint).__qualname__,
                "parts": len(parallel.module_fqns_per_model_part or [0]),
            }
        ),
    )
