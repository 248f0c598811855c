"""Rows of several documents, none of which sees another."""
