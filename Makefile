PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
RUN := outputs/quickstart
OLDEST := build/oldest
TRITON := build/triton
FAST := schedule solver lengths gating kv_cache cached_equals_uncached skip_generate stopping acceptance draft_policy prompt_inputs export files

.PHONY: help install quickstart test test-fast test-oldest test-kernels lint docs build clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

install: .venv/.installed ## create .venv with everything pinned in constraints.txt

# The stamp is the last thing written: a run that was cut short doesn't count, and the next one goes on where it stopped.
.venv/.installed: pyproject.toml constraints.txt skipdecode/kernels/cpu.cpp skipdecode/kernels/cpu_isa.h
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "constraints.txt needs Python 3.11 or newer: make install PYTHON=python3.11")'
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "Installing into .venv (a few minutes the first time)"
	@# torch alone and pinned: a newer one would bring gigabytes of CUDA where a build for the CPU is at hand.
	@$(PIP) install -qq -c constraints.txt torch==2.13.0
	@$(PIP) install -qq -c constraints.txt -e '.[dev]'
	@$(PIP) check
	@touch $@

quickstart: $(RUN)/eval/report.json ## train a small model that skips layers, measure it at 1x to 4x, print the report
	@cat $(RUN)/eval/report.md
	@echo
	@echo "Picture: $(RUN)/eval/frontier.png"
	@echo "To run it anew: rm -r $(RUN)"

$(RUN)/model.safetensors: | .venv/.installed
	$(PY) train.py --recipe quickstart

# Its tables stand in report.md, which is printed whether they are new or not.
$(RUN)/eval/report.json: $(RUN)/model.safetensors | .venv/.installed
	$(PY) -m eval --checkpoint $(RUN) --task departures --speedup 1 2 3 4 --output $(RUN)/eval >/dev/null

# The tests' models are tiny: two processes of one thread each are faster than threads that wait for each other. A file
# stays on one process, whose trained models its tests share; the order is that of tests/conftest.py.
test: install ## run the tests and the doctests
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-fast: install ## run the invariants of schedules and decoding, in under a minute
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n 2 --dist loadfile $(FAST:%=tests/library/test_%.py) tests/project/test_layout.py

# The oldest transformers that pyproject.toml names, and the last huggingface_hub that it takes, in a folder that goes
# before .venv's; everything else stays.
test-oldest: $(OLDEST)/.installed ## run the library's tests with the oldest transformers that it takes
	PYTHONPATH=$(CURDIR)/$(OLDEST) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n 2 --dist loadfile skipdecode tests/library

$(OLDEST)/.installed: pyproject.toml Makefile | .venv/.installed
	rm -rf $(OLDEST)
	$(PIP) install -qq --no-deps --target $(OLDEST) "huggingface_hub<2" \
		"transformers==$$(sed -n 's/^dependencies = .*transformers>=\([0-9.]*\).*/\1/p' pyproject.toml)"
	@touch $@

# Triton comes with torch's CUDA builds alone. This is the version of torch 2.13's, in a folder of its own; 3.9 fails in
# the interpreter beside a CPU build.
test-kernels: $(TRITON)/.installed ## run the GPU kernels without a GPU, in Triton's interpreter
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/$(TRITON) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n 2 -m "not gpu" \
		tests/library/test_gpu_layer.py tests/library/test_gpu_passes.py

$(TRITON)/.installed: Makefile | .venv/.installed
	rm -rf $(TRITON)
	$(PIP) install -qq --no-deps --target $(TRITON) triton==3.7.0
	@touch $@

lint: install ## check style, formatting and types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m mypy train.py

docs: install ## build the documentation's site into build/site/
	$(PY) -m mkdocs build --strict

# setuptools would pack whatever an earlier build left in build/.
build: install ## build the wheel into dist/
	rm -rf build
	$(PY) -m build --wheel
	rm -rf build

clean: ## remove build results and caches; .venv and outputs stay
	rm -rf build dist skipdecode.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
