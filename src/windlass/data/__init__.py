"""Data to training batches: corpora, tokenizers, token files, images, and the samples of each step.

A corpus is tokenised once and found again by the content of its files. The sequences of a step are
a function of the seed and the step alone, so there is no reader state to checkpoint.
"""

from windlass.data.batches import Batches, TokenBatch, batch_of_step
from windlass.data.chat import (
    ChatTemplate, chat_template_source, encode_question, find_chat_template, tells_date,
)  # fmt: skip
from windlass.data.chat.library_questions import QUESTIONS_TASK, save_library_questions
from windlass.data.dataset_cache import prepare_dataset, text_fingerprint
from windlass.data.examples import (
    ExampleArray, ExampleBatches, ExampleDataset, is_numbers, load_examples, make_examples,
    target_counts, with_one_target,
)  # fmt: skip
from windlass.data.examples.labelled_texts import labelled_fingerprint, prepare_labelled_texts
from windlass.data.excerpt import beginnings, documents_of_rows, write_excerpt
from windlass.data.images.image_cache import count_images, image_fingerprint, prepare_images
from windlass.data.keyed_choices import MlmMasking
from windlass.data.packing import (
    ConversationRows, MaskedRows, PairTokens, RowBatches, SentencePairs, conversation_batches,
    masked_batches, sentence_pair_batches,
)  # fmt: skip
from windlass.data.pixels import PixelScale
from windlass.data.read_ahead import Examples, ReadAhead, TrainingBatches
from windlass.data.sources import corpus_bytes
from windlass.data.token_files import (
    DatasetStatistics, PromptsMeta, SplitMeta, TokenDataset, dataset_statistics, document_files,
    held_out_texts, open_dataset,
)  # fmt: skip
from windlass.data.tasks import (
    CODE_CHOICES, ChoiceLikelihood, EncodedChoice, Question, code_tasks, save_questions,
    standard_error,
)  # fmt: skip
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.data.tokenizer_folder import converted_tokenizer

__all__ = [
    "CODE_CHOICES", "QUESTIONS_TASK", "Batches", "ChatTemplate", "ChoiceLikelihood",
    "ConversationRows", "DatasetStatistics", "EncodedChoice", "ExampleArray", "ExampleBatches",
    "ExampleDataset", "Examples", "MaskedRows", "MlmMasking", "PairTokens", "PixelScale",
    "PromptsMeta", "Question", "ReadAhead", "RowBatches", "SentencePairs", "SplitMeta",
    "TokenBatch", "TokenDataset", "Tokenizer", "TrainingBatches", "batch_of_step", "beginnings",
    "chat_template_source", "code_tasks", "conversation_batches", "converted_tokenizer",
    "corpus_bytes", "count_images", "dataset_statistics", "document_files", "documents_of_rows",
    "encode_question", "find_chat_template", "held_out_texts", "image_fingerprint", "is_numbers",
    "labelled_fingerprint", "load_examples", "load_tokenizer", "make_examples", "masked_batches",
    "open_dataset", "prepare_dataset", "prepare_images", "prepare_labelled_texts",
    "save_library_questions", "save_questions", "sentence_pair_batches", "standard_error",
    "target_counts", "tells_date", "text_fingerprint", "with_one_target", "write_excerpt",
]  # fmt: skip
