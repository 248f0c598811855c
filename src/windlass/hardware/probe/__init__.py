"""Measures this machine: matrix products, memory, disk, links, the optimizer and the compiler."""
