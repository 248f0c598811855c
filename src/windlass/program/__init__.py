"""Programs: a plan and a graph as one list of instructions for each device, proved first."""
