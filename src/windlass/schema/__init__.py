"""Defines the documents that all other packages exchange, as immutable data without behaviour.

They are the model graph, the machine, the request, the plan, its prediction, and the records of
runs, comparisons and verifications.
"""
