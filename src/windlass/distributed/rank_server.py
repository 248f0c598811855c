"""The process that imports what ranks need, and becomes each of them when it is to start."""

import gc
from importlib import import_module

from windlass.fork_server import serve_forks

_NEEDED = (
    "torch.fx.experimental.symbolic_shapes",  # by the first backward pass
    "windlass.distributed.rank_main",
    "windlass.cli.commands.rank",
    "windlass.runtime",
)


def become_ranks(channel: int) -> list[str]:
    """Imports what ranks need, and returns in each process that is forked, with its command line.

    The server itself ends with the process that has started it.

    Args:
        channel: the number of the socket on which that process asks.
    """
    import torch

    for module in _NEEDED:
        import_module(module)
    # A collector that looks at all objects would copy the memory that they are in.
    gc.collect()
    gc.freeze()
    request = serve_forks(channel)
    # OpenMP has read the variable already, when torch was imported.
    threads = request.environment["OMP_NUM_THREADS"].partition(",")[0]
    torch.set_num_threads(int(threads))
    return request.words
