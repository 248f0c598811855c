"""Text to training batches: corpora, tokenizers, token files, and the sequences of each step.

A corpus is tokenised once and found again by the content of its files. The sequences of a step are
a function of the seed and the step alone, so there is no reader state to checkpoint.
"""

from windlass.data.batches import (
    Batches,
    TokenBatch,
)
from windlass.data.dataset_cache import (
    prepare_dataset,
    text_fingerprint,
)
from windlass.data.examples import (
    ExampleBatches,
    ExampleDataset,
    load_examples,
    make_examples,
)
from windlass.data.excerpt import (
    write_excerpt,
)
from windlass.data.mlm_masking import (
    MlmMasking,
)
from windlass.data.statistics import (
    DatasetStatistics,
    dataset_statistics,
)
from windlass.data.token_files import (
    SplitMeta,
    TokenDataset,
    document_files,
    open_dataset,
)
from windlass.data.tokenizer import (
    load_tokenizer,
)

__all__ = [
    "Batches",
    "DatasetStatistics",
    "ExampleBatches",
    "ExampleDataset",
    "MlmMasking",
    "SplitMeta",
    "TokenBatch",
    "TokenDataset",
    "dataset_statistics",
    "document_files",
    "load_examples",
    "load_tokenizer",
    "make_examples",
    "open_dataset",
    "prepare_dataset",
    "text_fingerprint",
    "write_excerpt",
]
