"""Executes a plan exactly: interpreter, parameters, optimizer, stores and checkpoints.

It never searches for plans or predicts their cost.
"""
