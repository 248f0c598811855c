from .evaluate_on_ranks import score_rank
from .language_model import LanguageModel, load_language_model
from .task_scores import Scores, evaluate, score
from .text_samples import (
    AnswerDrawing, Drawing, open_dialogue, sample, usual_system_prompt, write_sample,
)  # fmt: skip

__all__ = [
    "AnswerDrawing", "Drawing", "LanguageModel", "Scores", "evaluate", "load_language_model",
    "open_dialogue", "sample", "score", "score_rank", "usual_system_prompt", "write_sample",
]  # fmt: skip
