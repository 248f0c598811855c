"""Serves the record of runs: a page, an API, and a place that other sites send their runs to."""

from windlass.server.access import LOOPBACK_NAMES, Access, make_token
from windlass.server.app import RecordServer
from windlass.server.listener import link_of, listen, serve_app
from windlass.server.run_answers import Analyses

__all__ = [
    "LOOPBACK_NAMES", "Access", "Analyses", "RecordServer", "link_of", "listen", "make_token",
    "serve_app",
]  # fmt: skip
