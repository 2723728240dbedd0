#!/bin/bash
# The runs of docs/results/privacy.md, one after the other. Runs that have ended are not run again: start it again after a stop.
#   benchmarks/privacy_results.sh DATA OUT     DATA holds digits5/*.npz and ham10000/<domain>/<class>/*.png; SET=ham10000 for the second
set -e
DATA=$1; OUT=$2; SET=${SET:-digits-five}; ROUNDS=${ROUNDS:-10}
METHODS=""
for base in "fedavg + group_norm" "fedwon" "fedwon + agc(clip=1.28)"; do
  METHODS="$METHODS; $base"
  for epsilon in 8.0 3.0 1.0; do METHODS="$METHODS; $base + dp_sgd(epsilon=$epsilon)"; done
done
if [ "$SET" = digits-five ]; then
  polyfed compare "digits-five(per_domain=1500)" --root "$DATA/digits5" --methods "${METHODS#; }" --model small_cnn --rounds "$ROUNDS" \
    --batch-size 256 --lr 0.2 --weights uniform --out "$OUT/digits-five"
else
  polyfed compare "$DATA/ham10000" --methods "${METHODS#; }" --model small_cnn --rounds "$ROUNDS" --batch-size 128 --local-steps 6 \
    --lr 0.2 --weights uniform --out "$OUT/ham10000"
fi
