"""Turns a plan and a graph into the instruction list of each device, offloaded or not."""
