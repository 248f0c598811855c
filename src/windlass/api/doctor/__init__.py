"""Tries a machine out: each kernel, allocator, exchange and kind of plan, then its rates."""
