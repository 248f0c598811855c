"""Predicts published training runs and measures how well the predictions hold.

Rows of a CSV table become runs (`row_to_run`), fitted laws predict their step time and peak memory
(`predict_run`), and `evaluate_table` compares predictions with measurements.
"""
