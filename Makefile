# Every target sets itself up in .venv and touches nothing outside the checkout. `make help` lists them.
# Say which Python with `make test PYTHON=/path/to/python`; otherwise the first of CANDIDATES that is new enough is used.

DEMO       = compare --recipe demo --workers auto --out runs/demo
DEMO_QUICK = compare digits-mini --methods "fedavg; fedbn" --rounds 1
RIVALS     = 'pfl[pytorch]==0.6.0' 'flwr[simulation]==1.41.0'
LEFT_OUT   = slow or flower or network or fuzz
# Those that need Flower but no processes of it are in `make test` too, and skipped there where it is not installed, as in CI.
FLOWER     = tests/flower
WORKERS    = 2

SHELL      := /bin/bash
VENV       := .venv
PY         := $(VENV)/bin/python
BENCH_VENV := benchmarks/.venv
NEWEST_VENV := .venv-newest-flower
NEWEST     := flwr==1.42.0
NEWEST_TESTS := tests/flower/deploy/test_stranger.py tests/flower/test_real_processes.py
DIST_VENV  := .venv-dist
BENCH_PY   := $(BENCH_VENV)/bin/python
PYTHON     ?=
CANDIDATES := python3.13 python3.12 python3.11 python3
USABLE     := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
HERE       := $(CURDIR)
STAMPS     := $(addprefix $(VENV)/.installed-,demo test dev docs flower)

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-fuzz test-flower test-flower-all check format docs bench wheel clean clean-all again

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | awk -F':.*  ## ' '{printf "  make %-16s %s\n", $$1, $$2}'

demo: $(VENV)/.installed-demo  ## compare seven methods over the five domains of digits-mini
	$(VENV)/bin/polyfed $(DEMO) $(ARGS)
	@$(VENV)/bin/polyfed report runs/demo -o runs/demo/report.html

test: export OMP_NUM_THREADS = 1
test: $(VENV)/.installed-test  ## run the tests, without those marked slow, fuzz, flower or network
	$(PY) -m pytest -n $(WORKERS) -m "not ($(LEFT_OUT))" $(ARGS)

test-slow: export OMP_NUM_THREADS = 1
test-slow: $(VENV)/.installed-test  ## run the tests marked slow
	$(PY) -m pytest -n $(WORKERS) -m slow $(ARGS)

test-fuzz: export OMP_NUM_THREADS = 1
test-fuzz: $(VENV)/.installed-test  ## 20,000 mutated replies over all methods, 2,000 damaged files of run folders
	$(PY) -m pytest -n $(WORKERS) -m fuzz $(ARGS)

test-flower: export OMP_NUM_THREADS = 1
test-flower: $(VENV)/.installed-flower  ## run the short Flower tests: a real SuperLink and SuperNodes on this machine
	$(PY) -m pytest -n $(WORKERS) -m "not ($(LEFT_OUT))" $(FLOWER) $(ARGS)
	$(PY) -m pytest -m "flower and not slow" $(ARGS)

test-flower-all: export OMP_NUM_THREADS = 1
test-flower-all: $(VENV)/.installed-flower $(NEWEST_VENV)/.installed  ## run all Flower tests: every method, every fault, and the newest Flower
	$(PY) -m pytest -n $(WORKERS) -m "not ($(LEFT_OUT))" $(FLOWER) $(ARGS)
	$(PY) -m pytest -m flower $(ARGS)
	$(NEWEST_VENV)/bin/python -m pytest $(NEWEST_TESTS) $(ARGS)

# The newest Flower gets an environment of its own, which borrows the rest from .venv by a path file (see wheel below). Without its
# dependencies: it may want packages that are newer than those of the registry.
$(NEWEST_VENV)/.installed: pyproject.toml Makefile $(VENV)/.installed-flower
	$(PY) -m venv --without-pip --clear $(NEWEST_VENV)
	@purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	borrowed=$$($(PY) -c "$$purelib"); \
	echo "$$borrowed" > "$$($(NEWEST_VENV)/bin/python -c "$$purelib")/borrowed.pth"
	$(PY) -m pip --python $(NEWEST_VENV)/bin/python install --quiet --no-deps '$(NEWEST)' --editable .
	@touch $@

check: $(VENV)/.installed-dev  ## lint, formatting, types and layers, as in CI
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/lint-imports --config .importlinter-cycles

format: $(VENV)/.installed-dev  ## mend what ruff can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.installed-docs  ## refresh the generated tables and build the site strictly into build/docs (open index.html; no network needed)
	$(PY) docs/generate.py
	$(PY) -m mkdocs build --strict
	POLYFED_SITE=build/docs $(PY) -m pytest -q tests/docs/test_site.py

bench: $(BENCH_VENV)/.installed  ## compare the speed of a round with a hand-written loop, pfl-research and Flower (ARGS="--works a --repeats 3")
	$(BENCH_PY) benchmarks/bench_speed.py $(ARGS)
	$(BENCH_PY) benchmarks/bench_growth.py
	$(BENCH_PY) benchmarks/profile_round.py
	$(BENCH_PY) benchmarks/write_results.py
	@echo "Wrote benchmarks/results.md"

# The rivals get an environment of their own, which borrows torch and the rest from .venv by a path file (see wheel below).
$(BENCH_VENV)/.installed: pyproject.toml Makefile $(VENV)/.installed-demo
	$(PY) -m venv --without-pip --clear $(BENCH_VENV)
	@purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	borrowed=$$($(PY) -c "$$purelib"); \
	echo "$$borrowed" > "$$($(BENCH_PY) -c "$$purelib")/borrowed.pth"
	$(PY) -m pip --python $(BENCH_PY) install --quiet $(RIVALS) --editable .
	@touch $@

# The clean environment borrows this one's packages by a path file, so torch is not downloaded again. Python does not follow
# the path files of a borrowed folder, so the editable install stays out of sight: what runs is the wheel.
wheel: export OMP_NUM_THREADS = 1
wheel: $(VENV)/.installed-dev $(DIST_VENV)/.installed  ## build wheel and sdist, check them, install the wheel in a clean environment and run a quick demo
	rm -rf dist
	$(DIST_VENV)/bin/python -m build --outdir dist
	$(DIST_VENV)/bin/python -m twine check --strict dist/*
	@set -eu; clean=$$(mktemp -d); trap 'rm -rf "$$clean"' EXIT; unset PYTHONPATH; \
	echo "Installing the wheel in $$clean"; \
	$(PY) -m venv --without-pip "$$clean/venv"; \
	pip() { "$(HERE)/$(PY)" -m pip --python "$$clean/venv/bin/python" "$$@"; }; \
	pip install --quiet --no-deps dist/*.whl; \
	purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	borrowed=$$($(PY) -c "$$purelib"); \
	echo "$$borrowed" > "$$("$$clean/venv/bin/python" -c "$$purelib")/borrowed.pth"; \
	cd "$$clean"; \
	pip check; \
	venv/bin/python -c 'import pathlib, polyfed, sys; home = pathlib.Path(polyfed.__file__).parent; print("polyfed is", home); sys.exit(not (home.is_relative_to(sys.prefix) and all((home / name).exists() for name in ("py.typed", "flower/deploy/templates/nginx.conf"))))'; \
	venv/bin/polyfed $(DEMO_QUICK)

# twine wants a newer packaging than Flower allows.
$(DIST_VENV)/.installed: Makefile $(VENV)/.made
	$(PY) -m venv --clear $(DIST_VENV)
	$(DIST_VENV)/bin/python -m pip install --quiet 'build==1.6.1' 'twine==7.0.0'
	@touch $@

clean:  ## remove what was built and cached, keep .venv
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

clean-all: clean  ## remove .venv too
	rm -rf $(VENV) $(BENCH_VENV) $(NEWEST_VENV) $(DIST_VENV)

# ---------------------------------------------------------------------------------------------------------------- set-up
# .venv/.made holds the folder it was made for; a moved or copied checkout, or a Python that is gone, starts again from there.
ifneq ($(shell cat $(VENV)/.made 2>/dev/null && $(PY) -c '' 2>/dev/null && echo runs),$(HERE) runs)
$(VENV)/.made: again
endif

$(VENV)/.made:
	@if $(PY) -m pip --version >/dev/null 2>&1 && $(PY) -c '$(USABLE)' && ls $(VENV)/lib/python*/site-packages/pip-*/INSTALLER >/dev/null 2>&1; then \
	    echo "Using the environment in $(VENV)"; \
	else \
	    found=; \
	    for candidate in $(or $(PYTHON),$(CANDIDATES)); do \
	        if "$$candidate" -c '$(USABLE)' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "polyfed needs Python 3.11 or newer with its venv module; tried: $(or $(PYTHON),$(CANDIDATES))." >&2; \
	        echo "Install one (Debian: apt-get install python3-venv), or name it: make PYTHON=/path/to/python ..." >&2; \
	        exit 1; \
	    fi; \
	    echo "Making $(VENV) with $$("$$found" --version)"; \
	    "$$found" -m venv --clear $(VENV); \
	fi
	@echo '$(HERE)' > $@

# A stamp says that an install ended, and is older than pyproject.toml when that has changed since.
extra-demo :=
extra-test := [test]
extra-dev  := [dev]
extra-docs := [test,docs]
extra-flower := [test,flower]
covers-demo := demo
covers-test := demo test
covers-dev  := demo test dev
covers-docs := demo test docs
covers-flower := demo test flower

# pip writes a package's INSTALLER after its files: without it the install was cut off, yet pip would take it for installed.
$(STAMPS): $(VENV)/.installed-%: pyproject.toml constraints.txt $(VENV)/.made
	@find $(VENV)/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' ! -exec test -e '{}/INSTALLER' \; -print -exec rm -rf {} + \
	    | sed 's/^/Half installed, to be repeated: /'
	@echo "Installing polyfed$(extra-$*) in $(VENV); the first time this brings PyTorch, which takes some minutes."
	$(PY) -m pip install --constraint constraints.txt --editable '.$(extra-$*)'
	@touch $(covers-$*:%=$(VENV)/.installed-%)
