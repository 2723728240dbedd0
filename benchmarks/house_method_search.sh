#!/bin/bash
# The search for a house method, in stages, on validation data only (polyfed sweep cannot read a test before it has chosen).
# Each stage is one resumable command with the same budget for every method; start it again after a stop.
# Usage: benchmarks/house_method_search.sh DATA_ROOT [OUT]      (look at stage N's sweep.json before naming stage N+1's methods)
set -euo pipefail
root=${1:?"usage: $0 DATA_ROOT [OUT]"}
out=${2:-runs/house}
common=(--lr 0.01,0.4 --trials 6 --halving --workers auto)

# Stage 1: single parts on the two sets that may be searched on.
singles="fedavg; fedbn; fedwon; fixbn; fedstein; gperxan; fedavg + weight_standard; fedavg + guiding; fedavg + agc; fedavg + group_norm; fedavgm"
polyfed sweep digits-mini --methods "$singles" --rounds 30 "${common[@]}" --out "$out/1-digits-mini"
polyfed sweep cifar10 --root "$root" --partition "dirichlet(clients=10, alpha=0.3)" --hold-out 0.1 --model resnet20 \
    --methods "$singles" --rounds 30 "${common[@]}" --out "$out/1-cifar10"

# Stage 2: pairs of what led stage 1; give them as PAIRS.
if [ -n "${PAIRS:-}" ]; then
    polyfed sweep digits-mini --methods "$PAIRS" --rounds 30 "${common[@]}" --out "$out/2-digits-mini"
fi
# Stage 3 (winner against the best single method, three seeds, on sets it was not searched on) is a polyfed compare --seeds 3.
