"""Tasks, scored by the likelihood that a model gives each choice, target or text."""

from windlass.data.tasks.code_tasks import code_tasks
from windlass.data.tasks.encode_choices import (
    EncodedChoice,
    EncodedTask,
    encode_choices,
    encode_task,
)
from windlass.data.tasks.task import Task, load_task, save_task
from windlass.data.tasks.task_items import TargetItem, TaskItem, TextItem
from windlass.data.tasks.task_score import ChoiceLikelihood, score_choices, standard_error

__all__ = [
    "ChoiceLikelihood",
    "EncodedChoice",
    "EncodedTask",
    "TargetItem",
    "Task",
    "TaskItem",
    "TextItem",
    "code_tasks",
    "encode_choices",
    "encode_task",
    "load_task",
    "save_task",
    "score_choices",
    "standard_error",
]
