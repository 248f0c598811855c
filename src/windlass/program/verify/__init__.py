"""Proves instruction lists correct before they run: work, data flow, memory and communication."""
