# make demo | test | lint | test-transformers-oldest | test-trl
#
# Each first makes an environment in .venv, once. With PYTHON=python3 (or a path) they take that interpreter with what
# is installed there, and install nothing. TORCH="torch==2.11.0" installs another PyTorch than the one chosen here.

VENV ?= .venv
GPU := $(shell command -v nvidia-smi)
TORCH ?= $(if $(GPU),torch,torch==2.13.0)
OLDEST ?= 5.17.0
TRL ?= 1.12.0 1.16.0
WORKERS ?= 2

ifdef PYTHON
READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
PYTEST = $(PYTHON) -m pytest $(if $(shell $(PYTHON) -c "import xdist" 2>&1),,-n $(WORKERS))
OLD := $(VENV)/transformers-$(OLDEST)
FAMILY_TESTS ?= $(wildcard $(addprefix tests/test_,$(addsuffix .py,families zoo zoo_vision names deferred trainer cli)))
TRL_TESTS ?= $(wildcard tests/test_trl*.py)

DEMO_GPU := --hidden-size 2048 --layers 4 --heads 32 --kv-heads 8 --intermediate-size 8192 --vocab-size 128256 --sequence-length 1024
DEMO ?= llama $(if $(GPU),$(DEMO_GPU))

.PHONY: demo test lint format test-transformers-oldest test-trl clean

demo: $(READY)
	$(PYTHON) -m liger_kernel.cli compare $(DEMO) --json out/compare.json --chart out/compare.png

test: $(READY)
	$(PYTEST) $(TESTS)

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: $(READY)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# The families again, on the oldest transformers that is covered.
test-transformers-oldest: $(OLD)/.ready
	PYTHONPATH=$(CURDIR)/$(OLD):$$PYTHONPATH $(PYTEST) $(FAMILY_TESTS)

$(OLD)/.ready: $(READY)
	$(PYTHON) -m pip install --quiet --upgrade --target $(OLD) transformers==$(OLDEST)
	touch $@

# TRL's trainers with this package's losses (1.12, the last that calls them) and with its layers alone.
test-trl: $(addprefix test-trl-,$(TRL))

test-trl-%: $(VENV)/trl-%/.ready
	PYTHONPATH=$(abspath $(<D))/site-packages:$$PYTHONPATH HF_HUB_OFFLINE=1 $(PYTEST) $(TRL_TESTS)

.PRECIOUS: $(VENV)/trl-%/.ready
$(VENV)/trl-%/.ready: $(READY)
	$(PYTHON) -m pip install --quiet --upgrade --no-deps --target $(@D)/site-packages trl==$*
	touch $@

$(VENV)/.ready: pyproject.toml
	@python3 -c "import sys; sys.exit(sys.version_info < (3, 10))" || { echo "make: Python 3.10 or newer is needed"; exit 1; }
	@python3 -m venv $(VENV) || { echo "make: python3 has no venv here; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(VENV)/bin/python -m pip install --quiet --upgrade $(TORCH) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) out
