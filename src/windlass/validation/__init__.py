"""Predicts published training runs and measures how well the predictions hold.

Rows of a CSV table become runs (`row_to_run`), the clock that plans predicts their step time and
peak memory (`predict_run`), and `evaluate_table` compares predictions with measurements.
"""

from windlass.validation.metrics import RelativeErrors
from windlass.validation.predict_run import RunPrediction
from windlass.validation.table_evaluation import Accuracy, TableEvaluation, evaluate_table

__all__ = [
    "Accuracy", "RelativeErrors", "RunPrediction", "TableEvaluation", "evaluate_table",
]  # fmt: skip
