"""What a model is asked: choices behind contexts, and questions made of text."""

from windlass.data.tasks.code_tasks import (
    CODE_CHOICES, ChoiceLikelihood, EncodedChoice, Question, code_tasks, save_questions,
    standard_error,
)  # fmt: skip

__all__ = [
    "CODE_CHOICES", "ChoiceLikelihood", "EncodedChoice", "Question", "code_tasks", "save_questions",
    "standard_error",
]  # fmt: skip
