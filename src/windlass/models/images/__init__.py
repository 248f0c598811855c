"""Models of images: the ends of vision transformers, and residual networks."""
