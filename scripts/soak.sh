#!/usr/bin/env bash
# A kill each three seconds for a quarter of an hour and more (the last living is spared), on four nodes and a spare:
# nothing may be lost, doubled or left behind.
# Usage: scripts/soak.sh [FILE.json] [drill.py's arguments]; the last one's result is in docs/results/soak.json.
set -euo pipefail
cd "$(dirname "$0")/.."
result=${1:-docs/results/soak.json}
shift || true
mkdir -p "$(dirname "$result")"
exec "${PYTHON:-python}" scripts/drill.py quickstart --nodes 4 --spares 1 --schedule "random mtbf 3s for 1000s" \
    --no-baselines --noise-seeds 0 --json "$result" "$@"
