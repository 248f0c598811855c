"""Accuracy on a few published runs, which are kept here so that it is tested everywhere."""

from pathlib import Path

from windlass.validation.table_evaluation import evaluate_table

SAMPLE = Path(__file__).with_name("published_sample.csv")
"""Rows that are evenly spaced in their tables, of those that no constant was fitted to."""
ASKED = 0.08


def test_a_sample_of_published_steps_is_predicted_within_8_percent_and_nearer_than_a_constant():
    evaluation = evaluate_table(SAMPLE)

    steps = evaluation.all_rows.step_time
    assert steps is not None
    assert steps.rows == evaluation.rows == 15
    assert steps.mean <= ASKED
    assert steps.baseline is not None
    assert steps.mean < steps.baseline / 2
    parts = [each.step_time for each in evaluation.by_precision.values()]
    assert sum(each.rows for each in parts if each) == evaluation.rows
