#!/usr/bin/env bash
# Lint, types and tests on the CPU. Arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/env.sh"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$bin/python" -m pytest -m "not gpu and not slow" "$@"
