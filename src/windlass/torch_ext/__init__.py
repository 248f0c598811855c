"""What torch lacks: a CPU allocator with a memory limit, and Adam moments in 16 and 8 bits."""
