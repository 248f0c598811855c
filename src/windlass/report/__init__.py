"""Draws plans, predictions and runs: terminal tables, SVG figures, HTML pages, Perfetto traces."""

import lazy_loader

# Tables of the terminal answer before the figures and pages would be imported.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
