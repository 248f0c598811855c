#!/usr/bin/env bash
# Tries Windlass on a GPU in at most 8 minutes, and writes one report to send.
#
#   scripts/gpu-first-run.sh [--dry-run] [--out REPORT.md] [--seconds 480] [--parts NAME ...]
#
# It needs a Python with Windlass and its tests (`make setup`): that of `.venv`, or of $PYTHON.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  [ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python
fi
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/benchmarks/gpu_first_run.py" "$@"
