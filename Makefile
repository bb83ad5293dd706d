# make demo | test | lint | docs | test-all | test-rest | test-isa | test-transformers-oldest | test-trl | test-megatron |
#      test-deepspeed
#
# Each first makes an environment in .venv, once. With PYTHON=python3 (or a path) they take that interpreter with what
# is installed there, and install nothing. TORCH="torch==2.11.0" installs another PyTorch than the one chosen here.

VENV ?= .venv
GPU := $(shell command -v nvidia-smi)
TORCH ?= $(if $(GPU),torch,torch==2.13.0)
OLDEST ?= 5.17.0
TRL ?= 1.12.0 1.16.0
MEGATRON ?= 0.16.1
DEEPSPEED ?= 0.19.8
WORKERS ?= 2

ifdef PYTHON
READY :=
DOCS_READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
endif

unexport PYTHONDONTWRITEBYTECODE  # torch and transformers are compiled once, and not in each of a hundred processes
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
PYTEST = $(PYTHON) -m pytest $(if $(shell $(PYTHON) -c "import xdist" 2>&1),,-n $(WORKERS) --dist loadgroup)
INSTALL = $(PYTHON) -m pip install --quiet --no-compile
OLD := $(VENV)/transformers-$(OLDEST)
FAMILIES := families* class_level loss_in_head* mask proofs zoo zoo_vision names deferred trainer
FAMILY_TESTS ?= $(wildcard $(FAMILIES:%=tests/patch/test_%.py))
TRL_TESTS ?= $(wildcard tests/*/test_trl*.py)
PRODUCT_TESTS ?= $(wildcard tests/ops/test_ops.py tests/ops/head/test_linear_*.py tests/ops/mlp/test_glu_linear.py)

# oneDNN's limits that are below this processor: a flag of /proc/cpuinfo and the limit up to which it is used.
LIMITS := avx2:AVX2 avx512bw:AVX512_CORE avx512_bf16:AVX512_CORE_BF16 avx512_fp16:AVX512_CORE_FP16 amx_bf16:AVX512_CORE_AMX
HERE := $(addsuffix :%,$(shell sed -n 's/^flags.*: //p;T;q' /proc/cpuinfo 2>/dev/null))
HERE := $(patsubst %:,,$(subst :,: ,$(filter $(HERE),$(LIMITS))))
ISA_LIMITS ?= $(filter-out $(lastword $(HERE)),$(HERE))

DEMO_GPU := --hidden-size 2048 --layers 4 --heads 32 --kv-heads 8 --intermediate-size 8192 --vocab-size 128256 --sequence-length 1024
DEMO ?= llama $(if $(GPU),$(DEMO_GPU))

.PHONY: demo test test-all test-rest test-isa lint format docs test-transformers-oldest test-trl \
	test-megatron test-deepspeed clean

demo: $(READY)
	$(PYTHON) -m liger_kernel.cli compare $(DEMO) --json out/compare.json --chart out/compare.png

# Every operator, every kind of family, the command line; every test; every test that the first leaves out.
test: $(READY)
	$(PYTEST) -m "not thorough" $(TESTS)

test-all: $(READY)
	$(PYTEST) $(TESTS)

test-rest: $(READY)
	$(PYTEST) -m thorough $(TESTS)

# The operators around a matrix product, with the 16-bit products that oneDNN has for lesser processors.
test-isa: $(addprefix test-isa-,$(ISA_LIMITS))

test-isa-%: $(READY)
	ONEDNN_MAX_CPU_ISA=$* $(PYTEST) -k "(linear or distillation) and bfloat16 and not passes" $(PRODUCT_TESTS)

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: $(READY)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# The pages of docs and the API reference, as a site: out/site/index.html.
docs: $(READY) $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

$(VENV)/.docs-ready: $(VENV)/.ready
	$(INSTALL) -e ".[docs]"
	touch $@

# The families again, on the oldest transformers that is covered: that they train as before.
test-transformers-oldest: $(OLD)/.ready
	PYTHONPATH=$(CURDIR)/$(OLD):$$PYTHONPATH $(PYTEST) -m "every_family or not thorough" -k "not compil and not revert and not report_says" $(FAMILY_TESTS)

$(OLD)/.ready: $(READY)
	$(INSTALL) --upgrade --target $(OLD) transformers==$(OLDEST)
	touch $@

# TRL's trainers with this package's losses (1.12, the last that calls them) and with its layers alone.
test-trl: $(addprefix test-trl-,$(TRL))

test-trl-%: $(VENV)/trl-%/.ready
	PYTHONPATH=$(abspath $(<D))/site-packages:$$PYTHONPATH HF_HUB_OFFLINE=1 $(PYTEST) $(TRL_TESTS)

.PRECIOUS: $(VENV)/trl-%/.ready
$(VENV)/trl-%/.ready: $(READY)
	$(INSTALL) --upgrade --no-deps --target $(@D)/site-packages trl==$*
	touch $@

# Megatron-Core's GPT on two ranks.
test-megatron: $(VENV)/megatron-$(MEGATRON)/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTEST) tests/megatron

$(VENV)/megatron-%/.ready: $(READY)
	$(INSTALL) --upgrade --no-deps --target $(@D) megatron-core==$*
	touch $@

# DeepSpeed's ZeRO and its sequence parallelism on two ranks. Nothing of it is compiled.
test-deepspeed: $(VENV)/deepspeed-$(DEEPSPEED)/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTEST) tests/distributed/test_zero.py tests/distributed/test_ulysses.py

$(VENV)/deepspeed-%/.ready: $(READY)
	DS_BUILD_OPS=0 $(INSTALL) --upgrade --no-deps --no-build-isolation --target $(@D) deepspeed==$*
	$(INSTALL) --upgrade --target $(@D) hjson py-cpuinfo einops msgpack pydantic
	touch $@

$(VENV)/.ready: pyproject.toml
	@python3 -c "import sys; sys.exit(sys.version_info < (3, 10))" || { echo "make: Python 3.10 or newer is needed"; exit 1; }
	@python3 -m venv $(VENV) || { echo "make: python3 has no venv here; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(INSTALL) --upgrade $(TORCH) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) out
