"""Engines: other software that runs a plan, behind the training loop of `windlass.runtime`.

`torch` is PyTorch's own distributed stack. Which plans an engine may get says the `can` table of
the stack of the same name: the planner searches within it, and a plan outside is refused by name
before an engine is started. So an engine is given nothing that it cannot run.
"""
