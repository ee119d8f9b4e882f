#!/usr/bin/env bash
# Check the subjects of the commits of a branch: at most 72 characters, and a scope first.
#   bash scripts/check_subjects.sh [BASE]    commits after BASE, by default after origin/main
set -euo pipefail
cd "$(dirname "$0")/.."
most=72 bad=0
while IFS= read -r subject; do
  if [ "${#subject}" -gt "$most" ]; then
    echo "error: ${#subject} characters, at most $most: $subject"
    bad=1
  elif [[ ! $subject =~ ^[a-z0-9][a-z0-9_\ ,-]*:\ [a-z] ]]; then
    echo "error: begin with a scope and an imperative, as in \"plan: compare digests\": $subject"
    bad=1
  fi
done < <(git log --no-merges --format=%s "${1:-origin/main}..HEAD")
exit $bad
