# Sourced by train.sh and test.sh: make .venv with the pinned dependencies if it is missing or out of date.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/phalanx.stamp
if [ -n "${PHALANX_PYTHON:-}" ]; then
  bin=$(dirname "$PHALANX_PYTHON")
else
  if ! cmp -s pyproject.toml "$stamp"; then
    for python in python3.12 python3.13 python3; do
      if "$python" --version >/dev/null 2>&1; then break; fi
    done
    "$python" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' || {
      echo "Phalanx needs Python 3.12 or 3.13 as python3.12, python3.13 or python3 on the PATH" >&2
      exit 2; }
    echo "Installing into .venv (once; a few minutes)" >&2
    "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
    cp pyproject.toml "$stamp"
  fi
  bin=.venv/bin
fi
