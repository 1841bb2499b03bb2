# Every target sets itself up: a virtual environment in .venv, the package installed in it.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
DOCS   := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow coverage lint format bench bench-estimators bench-learning bench-regret bench-suggest bench-paths bench-fine-tuning papers fuzz networks mutants soak reliability zoo docs tutorials upstream test-laplace release-check test-matrix clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(READY)

demo: $(READY)  ## learn how far digits were rotated, under a minute; figures go to demo/
	rm -rf demo
	$(BIN)/laplace-invariance learn --data digits --transform fully-rotated --out demo

test: $(READY)  ## run the tests, a few minutes on two cores
	$(BIN)/python -m pytest -n auto --dist loadgroup

test-slow: $(READY)  ## run the slow tests as well
	$(BIN)/python -m pytest -n auto --dist loadgroup -m 'slow or not slow'

coverage: $(READY)  ## run the tests and report the lines that they do not reach
	$(BIN)/python -m pytest -n auto --dist loadgroup --cov --cov-report=term

lint: $(READY)  ## check style, formatting, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure time and memory, and keep the tables in benchmarks/README.md
	$(BIN)/python benchmarks/bench.py --write
	$(BIN)/python benchmarks/bench_layers.py --write
	$(BIN)/python benchmarks/bench_engines.py --write
	$(BIN)/python benchmarks/bench_growth.py --write
	$(BIN)/python benchmarks/bench_models.py --write
	$(BIN)/python benchmarks/bench_memory.py --write
	$(BIN)/python benchmarks/bench_ranks.py --write

fuzz: $(READY)  ## resume from a thousand damaged or forged checkpoints, minutes
	$(BIN)/python benchmarks/checkpoints.py

networks: $(READY)  ## check 500 random networks, a quarter of an hour
	$(BIN)/python benchmarks/networks.py

mutants: $(READY)  ## break the core in many places, and count what the tests notice; hours
	$(BIN)/python benchmarks/mutants.py

soak: SECONDS ?= 7200
soak: $(READY)  ## interrupt and resume runs for two hours, or make soak SECONDS=1200
	$(BIN)/python benchmarks/soak.py --seconds $(SECONDS)

reliability: $(READY)  ## write the counts of these four into docs/reliability.md; runs nothing
	$(BIN)/python benchmarks/reliability.py --write

papers: $(READY)  ## run the tables of the papers, hours; runs that are there stay
	$(BIN)/python benchmarks/papers.py --write

bench-estimators: $(READY)  ## compare estimators of the evidence; rows that are there stay
	$(BIN)/python benchmarks/bench_estimators.py --write

bench-learning: $(READY)  ## compare what estimators learn in whole trainings; runs that are there stay
	$(BIN)/python benchmarks/bench_learning.py --write

bench-regret: $(READY)  ## compare learnt ranges with the best that are known; runs that are there stay
	$(BIN)/python benchmarks/bench_regret.py --write

bench-suggest: $(READY)  ## ask what would help networks trained without augmentation; runs that are there stay
	$(BIN)/python benchmarks/bench_suggest.py --write

bench-paths: $(READY)  ## compare starts of free paths, and what layers choose; runs that are there stay
	$(BIN)/python benchmarks/bench_paths.py --write

bench-fine-tuning: $(READY)  ## fine-tune networks that were trained before; results that are there stay
	$(BIN)/python benchmarks/bench_fine_tuning.py --write

zoo: $(READY)  ## which networks of torchvision, timm and transformers are covered; results that are there stay
	$(BIN)/pip install --quiet -e .[zoo]
	$(BIN)/python benchmarks/bench_zoo.py --write

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $(DOCS)

docs: $(DOCS)  ## build the documentation into site/, and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python docs/site/check.py site

tutorials: $(READY)  ## run the notebooks of docs/tutorials, and keep what they show, minutes
	$(BIN)/python -W ignore docs/site/notebooks.py

upstream: $(READY)  ## make upstream SDIST=file LAPLACE=checkout: try the change for laplace-torch
	$(BIN)/python upstream/apply.py $(SDIST) $(LAPLACE)

test-laplace: $(READY)  ## make test-laplace LAPLACE=checkout: run laplace-torch's tests on our backends
	$(BIN)/python upstream/their_tests.py $(LAPLACE)

test-matrix: $(READY)  ## test other versions of Python and torch, gigabytes and hours; results that are there stay
	$(BIN)/python tools/matrix.py

release-check: $(READY)  ## build the package, install it into a new environment and try it; minutes
	$(BIN)/pip install --quiet -e .[release]
	$(BIN)/python tools/release_check.py

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) build dist site *.egg-info .coverage .mypy_cache .import_linter_cache .pytest_cache .hypothesis .ruff_cache
