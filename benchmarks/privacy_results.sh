#!/bin/bash
# The runs of docs/results/privacy.md, one after the other, and then their leakage. Start it again after a stop: runs that have
# ended are not run again, one that was stopped goes on from its checkpoint, and leakage that was measured is not measured again.
#   benchmarks/privacy_results.sh DATA OUT
# DATA holds digits5/*.npz. For SET=ham10000 it holds ham10000/<domain>/<class>/*.png, reduced to 600 images a domain and three classes:
#   python benchmarks/ham10000_tiles.py ham10000_64.tar DATA/ham10000 600
# SET: digits-five, ham10000, or all. Then: python benchmarks/write_privacy.py OUT
set -e
DATA=$1; OUT=$2; SET=${SET:-all}
METHODS=""
for base in "fedavg + group_norm" "fedwon" "fedwon + agc(clip=1.28)"; do
  METHODS="$METHODS; $base"
  for epsilon in 8.0 3.0 1.0; do METHODS="$METHODS; $base + dp_sgd(epsilon=$epsilon)"; done
done

leakage() {  # of every run in a folder that has ended
  mkdir -p "$OUT/leakage/$1"
  for run in "$OUT/$1"/*/; do
    file="$OUT/leakage/$1/$(basename "$run").json"
    if [ -e "$run/answers.safetensors" ] && [ ! -e "$file" ]; then
      polyfed audit leakage "$run" --json --quiet > "$file.part" && mv "$file.part" "$file"
    fi
  done
}

if [ "$SET" = digits-five ] || [ "$SET" = all ]; then
  polyfed compare "digits-five(per_domain=1500)" --root "$DATA/digits5" --methods "${METHODS#; }" --model small_cnn --rounds "${ROUNDS:-10}" \
    --batch-size 256 --lr 0.2 --loss cross_entropy --weights uniform --out "$OUT/digits-five"
  leakage digits-five
fi
if [ "$SET" = ham10000 ] || [ "$SET" = all ]; then
  polyfed compare "$DATA/ham10000" --methods "${METHODS#; }" --model small_cnn --rounds "${ROUNDS:-5}" --batch-size 128 --local-steps 6 \
    --lr 0.2 --loss cross_entropy --weights uniform --out "$OUT/ham10000"
  leakage ham10000
fi
