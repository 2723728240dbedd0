#!/bin/bash
# Is what the doctor recommends among the best two? Each federation: ask the doctor, then train its advice and the others with equal budgets, at
# rates that validation data choose. Every command goes on where it was stopped. The tables: python benchmarks/write_sweeps.py benchmarks/doctor_judged.md OUT
# Usage: benchmarks/doctor_judged.sh DATA_ROOT [OUT]
set -euo pipefail
root=${1:?"usage: $0 DATA_ROOT [OUT]"}
out=${2:-runs/search}/judge
few="fedavg; fedbn; silobn; fedwon; fixbn; gperxan; fedavg + group_norm"
all="$few; fedstein"

judged() {  # name, methods, rates, seeds, options of the search, model, then what both are given
    local name=$1 methods=$2 rates=$3 seeds=$4 search=$5 model=$6
    shift 6
    polyfed doctor "$@" --root "$root" --model "$model"
    # shellcheck disable=SC2086
    polyfed sweep "$@" $search --root "$root" --model "$model" --methods "$methods" --lr "$rates" --seeds "$seeds" --out "$out/$name"
}

judged digits-five "$all" 0.03,0.1,0.3 3 "--rounds 20 --hold-out 0.1" small_cnn digits-five
judged office "$all" 0.03,0.1,0.3 3 "--rounds 25 --local-steps 10 --hold-out 0.1" small_cnn "office-caltech10(size=64)"
judged pacs "$all" 0.03,0.1,0.3 3 "--rounds 25 --local-steps 20" small_cnn "pacs(size=32)"
judged 100-clients "$few" 0.03,0.1,0.3 1 "--rounds 40 --hold-out 0.1" small_cnn digits-five --partition "domain_even(clients=20)" \
    --clients-per-round 10 --batch-size 8
judged batch-2 "$few" 0.01,0.03,0.1 3 "--rounds 20 --hold-out 0.1" small_cnn "digits-five(per_domain=100)" --batch-size 2
judged ham "$all" 0.001,0.003,0.01 3 "--rounds 30 --local-steps 15 --loss weighted_focal --hold-out 0.1" small_cnn "fed-isic2019(size=32)"
# The guide of gperxan needs a class for each example, so perxan takes its place on masks.
judged camvid "${few/gperxan/perxan}" 0.03,0.1,0.3 1 "--rounds 10 --hold-out 0.2" small_unet camvid --partition "domain_parts(parts=3)" \
    --unseen Seq05VD --batch-size 8
