"""Tasks of several choices, scored by the likelihood that a model gives each choice."""

from windlass.data.tasks.code_tasks import code_tasks
from windlass.data.tasks.task import (
    EncodedChoice,
    Task,
    TaskItem,
    encode_choices,
    load_task,
    save_task,
)
from windlass.data.tasks.task_score import TaskScore, score_choices, standard_error

__all__ = [
    "EncodedChoice",
    "Task",
    "TaskItem",
    "TaskScore",
    "code_tasks",
    "encode_choices",
    "load_task",
    "save_task",
    "score_choices",
    "standard_error",
]
