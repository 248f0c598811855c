"""Recipes: experiments and trainings of the field that one command plans, runs and reports."""
