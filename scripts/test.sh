#!/usr/bin/env bash
# Lint, types and tests on the CPU, in less than a quarter of an hour on two idle cores. --all also
# runs what is marked slow. Other arguments go to pytest: files, -k, -x; -n 0 runs all tests in one
# process.
set -euo pipefail
source "$(dirname "$0")/env.sh"
chosen="not gpu and not slow" rest=()
for argument; do
  if [ "$argument" = --all ]; then chosen="not gpu"; else rest+=("$argument"); fi
done
"$bin/ruff" check .
"$bin/ruff" format --check .
types=$(mktemp)
trap 'rm -f "$types"' EXIT
"$bin/mypy" --cache-dir "${XDG_CACHE_HOME:-$HOME/.cache}/phalanx/mypy" >"$types" 2>&1 &
mypy=$! code=0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
unset PYTHONDONTWRITEBYTECODE # dozens of processes import the same files
"$bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 20 -m "$chosen" \
  "${rest[@]}" || code=$?
wait "$mypy" || code=$((code ? code : 1))
cat "$types"
exit "$code"
