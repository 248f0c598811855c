"""Linear layers that multiply 8-bit factors, alone, with adapters and divided among ranks."""
