#!/bin/bash
# The search for a house method on validation data of digits-mini, in three stages, and its trial on three sets it was not searched on.
# Every command is a resumable polyfed sweep with the same budget for each method; a sweep cannot read a test before it has chosen.
# Usage: benchmarks/house_method_search.sh DATA_ROOT [OUT]      (benchmarks/doctor_judged.sh has the methods it is compared with)
set -euo pipefail
root=${1:?"usage: $0 DATA_ROOT [OUT]"}
out=${2:-runs/search}
search=(--rounds 20 --lr 0.02,0.4 --trials 6 --halving)
trial=(--model small_cnn --lr 0.03,0.1,0.3 --seeds 3)

# Stage 1: single parts. Stage 2: pairs with the two that led. Stage 3: what helped both of them, together.
singles="fedavg; fedbn; silobn; fedwon; fixbn; fedstein; gperxan; hfedf; perxan; fedavg + weight_standard; fedavg + guiding; fedavg + agc"
singles+="; fedavg + group_norm; fedavg + ibn; fedavg + momentum; fedavgm; fedadam; feddg_ga; fedprox"
pairs="fedbn + weight_standard; fedbn + agc; fedbn + guiding; fedbn + fedavgm; fedbn + ibn"
pairs+="; gperxan + weight_standard; gperxan + agc; gperxan + fedavgm"
more="fedbn + agc + guiding; fedbn + agc + weight_standard; fedbn + agc + guiding + weight_standard; gperxan + agc + weight_standard"
polyfed sweep digits-mini --methods "$singles" "${search[@]}" --out "$out/house/1-digits-mini"
polyfed sweep digits-mini --methods "$pairs" "${search[@]}" --out "$out/house/2-digits-mini"
polyfed sweep digits-mini --methods "$more" "${search[@]}" --out "$out/house/3-digits-mini"

# The best on validation data of all stages, and without each of its parts, where it was not searched; beside it the methods of the papers that
# the doctor's trial does not have.
chosen="gperxan + agc + weight_standard; gperxan + agc; gperxan + weight_standard"
papers="hfedf; fixbn with schedule=steps(at=(0.5, 0.75), factor=0.1)"
tried() {  # name, then what the sweep is given
    local name=$1
    shift
    polyfed sweep "$@" --root "$root" --methods "$chosen" "${trial[@]}" --out "$out/judge/$name-house"
    polyfed sweep "$@" --root "$root" --methods "$papers" "${trial[@]}" --out "$out/judge/$name-papers"
}
tried digits-five digits-five --rounds 20 --hold-out 0.1
tried office "office-caltech10(size=64)" --rounds 25 --local-steps 10 --hold-out 0.1
tried pacs "pacs(size=32)" --rounds 25 --local-steps 20
