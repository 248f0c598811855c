"""Says which tensors each instruction reads, creates and frees, and how many bytes that takes."""
