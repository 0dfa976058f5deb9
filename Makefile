# make test checks and tests everything; make demo shows it; make chaos tries to break runs. All set up .venv first.

PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check --quiet

.PHONY: .venv demo test chaos lint format models clean

.venv: .venv/.installed

# PyTorch comes first and alone, so that the machine's own build of this version is taken where there is one.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up .venv; the first time takes some minutes"
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@$(PIP) install $$(grep '^torch==' constraints.txt)
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

demo: .venv
	@.venv/bin/undertow demo

# Two test processes of one thread each; nothing is looked up on the network.
test: export HF_HUB_OFFLINE = 1
test: export OMP_NUM_THREADS = 1
test: export TOKENIZERS_PARALLELISM = false
test: lint
	.venv/bin/python -m pytest -n 2

# Kills, damage, full disks and the like, two scripts at a time, about ten minutes: docs/reliability.md.
chaos: .venv
	@.venv/bin/python scripts/chaos/all.py

lint: .venv
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

# SmolLM2-135M-Instruct for the retrofit recipes, about 540 MB.
models: .venv
	@$(PIP) install -c constraints.txt -e ".[gguf]"
	@.venv/bin/python scripts/fetch_smollm2.py

format: .venv
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

clean:
	rm -rf build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
