"""Takes an `nn.Module` apart into the layers of a stack, by tracing its forward pass."""
