# make demo | test | lint | docs | test-all | test-rest | test-isa | test-newest | test-transformers-oldest | test-trl |
#      test-megatron | test-deepspeed | test-frameworks, or one of them | test-portability | test-xpu | test-hub-kernel |
#      test-cluster | test-loggers
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
LIGHTNING ?= 2.6.6
LLAMA_FACTORY ?= 0.9.5
SWIFT ?= 4.6.0
TRAINER ?= 5.0.0 5.17.0
AXOLOTL ?= 0.19.0
KERNELS ?= 0.16.2 0.17.2
FLYTE ?= 1.16.31
TORCHAO ?= 0.18.0
BITSANDBYTES ?= 0.50.2
TRITON_XPU ?= 3.3.0b1
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
FAMILY_TESTS ?= $(filter-out %_gpu.py,$(wildcard tests/patch/families/test_*.py)) $(wildcard tests/patch/loss/test_loss_in_head*.py) \
	tests/patch/layers/test_mask.py tests/patch/proof/test_proofs.py
NEWEST_TESTS ?= tests/core tests/ops tests/losses $(FAMILY_TESTS)
COMPILE_TESTS ?= -k compil tests/ops/test_ops.py tests/ops/test_double_backward.py tests/patch
TRL_TESTS ?= $(wildcard tests/*/test_trl*.py tests/patch/loss/test_trl*.py)
PRODUCT_TESTS ?= $(wildcard tests/ops/test_ops.py tests/ops/head/test_linear_*.py tests/ops/mlp/test_glu_linear.py)

# oneDNN's limits that are below this processor: a flag of /proc/cpuinfo and the limit up to which it is used.
LIMITS := avx2:AVX2 avx512bw:AVX512_CORE avx512_bf16:AVX512_CORE_BF16 avx512_fp16:AVX512_CORE_FP16 amx_bf16:AVX512_CORE_AMX
HERE := $(addsuffix :%,$(shell sed -n 's/^flags.*: //p;T;q' /proc/cpuinfo 2>/dev/null))
HERE := $(patsubst %:,,$(subst :,: ,$(filter $(HERE),$(LIMITS))))
ISA_LIMITS ?= $(filter-out $(lastword $(HERE)),$(HERE))

DEMO_GPU := --hidden-size 2048 --layers 4 --heads 32 --kv-heads 8 --intermediate-size 8192 --vocab-size 128256 --sequence-length 1024
DEMO ?= llama $(if $(GPU),$(DEMO_GPU))

.PHONY: demo test test-all test-rest test-isa lint format docs test-newest test-transformers-oldest test-trl \
	test-megatron test-deepspeed test-frameworks test-lightning test-llama-factory test-axolotl test-swift test-callers \
	test-trl-oldest test-trainer test-torchao test-bitsandbytes test-single-operators test-portability test-xpu \
	test-hub-kernel test-cluster test-loggers environments clean

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

# The newest PyTorch that pip finds, which brings 5 GB of CUDA, and the Triton that it asks for: operators, losses,
# proofs, families, torch.compile, TRL's trainers.
test-newest: $(VENV)/newest/.ready
	$(MAKE) test PYTHON=$(VENV)/newest/bin/python TESTS="$(NEWEST_TESTS)"
	$(MAKE) test-all PYTHON=$(VENV)/newest/bin/python TESTS="$(COMPILE_TESTS)"
	$(MAKE) test-trl-$(lastword $(TRL)) PYTHON=$(VENV)/newest/bin/python

$(VENV)/newest/.ready: pyproject.toml
	$(MAKE) $@ VENV=$(@D) PYTHON=$(@D)/bin/python TORCH=torch

# The families again, on the oldest transformers that is covered: that they train as before.
test-transformers-oldest: $(OLD)/.ready
	PYTHONPATH=$(CURDIR)/$(OLD):$$PYTHONPATH $(PYTEST) -m "every_family or not thorough" -k "not compil and not revert and not report_says" $(FAMILY_TESTS)

# The Trainer of the oldest transformers that is covered, and of an older one still, on which fewer layers are replaced.
test-trainer: $(TRAINER:%=test-trainer-%)

test-trainer-%: $(VENV)/transformers-%/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTEST) tests/patch/test_trainer.py

.PRECIOUS: $(VENV)/transformers-%/.ready
$(VENV)/transformers-%/.ready: $(READY)
	$(INSTALL) --upgrade --target $(@D) transformers==$*
	touch $@

# TRL's trainers with this package's losses (1.12, the last that calls them) and with our head in the place of theirs.
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

# DeepSpeed's ZeRO, sequence parallelism and vocabulary-parallel loss on two ranks. Nothing of it is compiled.
test-deepspeed: $(VENV)/deepspeed-$(DEEPSPEED)/.ready $(VENV)/trl-$(lastword $(TRL))/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTEST) tests/distributed/test_zero.py tests/distributed/test_ulysses.py \
		tests/frameworks/test_deepspeed_loss.py tests/patch/test_sharded_hybrids.py
	PYTHONPATH=$(abspath $(<D)):$(abspath $(VENV)/trl-$(lastword $(TRL))/site-packages):$$PYTHONPATH $(PYTEST) \
		tests/patch/loss/test_trl_head_ranks.py tests/patch/loss/test_trl_head_ulysses.py

$(VENV)/deepspeed-%/.ready: $(READY)
	DS_BUILD_OPS=0 $(INSTALL) --upgrade --no-deps --no-build-isolation --target $(@D) deepspeed==$*
	$(INSTALL) --upgrade --target $(@D) hjson py-cpuinfo einops msgpack pydantic
	touch $@

# Every launch of every kernel compiled from source for every target; the suite compiles less. No GPU is needed.
test-portability: $(READY)
	PORTABILITY=complete $(PYTEST) tests/ops/test_portability.py

# Every kernel compiled for Intel's GPUs, by a Triton that has their back end. No GPU is needed.
test-xpu: $(VENV)/triton-xpu-$(TRITON_XPU)/.ready
	XPU_COMPILER=$(abspath $(<D)) $(PYTEST) tests/ops/test_portability.py

$(VENV)/triton-xpu-%/.ready: $(READY)
	$(INSTALL) --upgrade --no-deps --target $(@D) triton-xpu==$*
	touch $@

# The kernel for Hugging Face's hub, by the package kernels: each version with the newest transformers that takes it,
# and the newest with the newest transformers, which takes none that there is.
TRANSFORMERS_OF_0.16.2 := 5.17.0
TRANSFORMERS_OF_0.17.2 := 5.22.2
KERNELS_NEEDS_0.16.2 := kernels-data==0.16.2
WITH_KERNELS_0.16.2 := tests/patch/proof/test_proofs.py tests/patch/families/test_families.py
NEWEST_KERNELS := $(lastword $(KERNELS))

test-hub-kernel: $(KERNELS:%=test-hub-kernel-%)
	PYTHONPATH=$(abspath $(VENV)/kernels-$(NEWEST_KERNELS)):$$PYTHONPATH HF_HUB_OFFLINE=1 $(PYTEST) tests/frameworks/test_hub_kernel.py

.SECONDEXPANSION:
test-hub-kernel-%: $(VENV)/kernels-%/.ready $(VENV)/transformers-$$(TRANSFORMERS_OF_$$*)/.ready
	PYTHONPATH=$(abspath $(<D)):$(abspath $(dir $(word 2,$^))):$$PYTHONPATH HF_HUB_OFFLINE=1 $(PYTEST) tests/frameworks/test_hub_kernel.py $(WITH_KERNELS_$*)

.PRECIOUS: $(VENV)/kernels-%/.ready
$(VENV)/kernels-%/.ready: $(READY)
	$(INSTALL) --upgrade --no-deps --target $(@D) kernels==$* tomlkit $(KERNELS_NEEDS_$*)
	touch $@

# examples/cluster: its manifests against the schemas of their kinds, its Flyte workflow, workers that are killed.
test-cluster: $(VENV)/flyte-$(FLYTE)/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTEST) tests/frameworks/test_cluster*.py

$(VENV)/flyte-%/.ready: $(READY)
	$(INSTALL) --upgrade --target $(@D) flytekit==$* flytekitplugins-kfpytorch==$* kubeflow-training==1.9.4 kubeflow-trainer-api==2.3.0
	touch $@

# LigerMetrics through the Trainer's integrations. MLflow keeps its runs in SQLite.
LOGGERS := tensorboard==2.21.0 wandb==0.31.0 mlflow-skinny==3.17.2 sqlalchemy alembic

test-loggers: $(VENV)/loggers/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTHON) -m pytest tests/metrics/test_loggers.py

$(VENV)/loggers/.ready: $(READY)
	$(INSTALL) --upgrade --target $(@D) $(LOGGERS)
	touch $@

# Training frameworks, run by their own commands, each in an environment of its own (docs/frameworks.md).
test-frameworks: test-lightning test-llama-factory test-axolotl test-swift test-callers test-trl test-trl-oldest \
	test-transformers-oldest test-trainer test-deepspeed test-megatron test-hub-kernel test-torchao test-bitsandbytes \
	test-single-operators

test-lightning: $(VENV)/lightning-$(LIGHTNING)/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTHON) -m pytest tests/frameworks/test_lightning.py tests/metrics/test_lightning_metrics.py

$(VENV)/lightning-%/.ready: $(READY)
	$(INSTALL) --upgrade --no-deps --target $(@D) lightning==$* lightning-utilities torchmetrics
	touch $@

# Its own versions of transformers and TRL. Text needs nothing of torchaudio but that it can be imported.
LLAMA_FACTORY_NEEDS := transformers==5.6.0 trl==0.24.0 peft==0.18.1 accelerate==1.11.0 datasets==4.0.0 dill==0.3.8 \
	multiprocess==0.70.16 fsspec==2025.3.0 "huggingface_hub<2" "tokenizers<0.23" httpx httpcore omegaconf \
	torchdata==0.11.0 torchaudio==2.11.0

test-llama-factory: $(VENV)/llamafactory-$(LLAMA_FACTORY)/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTHON) -m pytest tests/frameworks/test_llama_factory.py

# TRL by itself, in the versions of LLaMA-Factory.
test-trl-oldest: $(VENV)/llamafactory-$(LLAMA_FACTORY)/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH HF_HUB_OFFLINE=1 $(PYTHON) -m pytest tests/frameworks/test_oldest_trl.py

$(VENV)/llamafactory-%/.ready: $(READY)
	$(INSTALL) --upgrade --no-deps --target $(@D) llamafactory==$* $(LLAMA_FACTORY_NEEDS)
	rm -rf $(@D)/torchaudio/lib
	touch $@

# Axolotl with the versions that it pins, but for this package.
AXOLOTL_NEEDS := transformers==5.16.1 trl==1.9.0 accelerate==1.13.0 peft==0.20.0 datasets==4.8.4 torchao==0.17.0 \
	huggingface_hub==1.17.0 tokenizers==0.23.1 pydantic==2.12.5 pydantic-core==2.41.5 bitsandbytes==0.50.2 \
	optimum==1.16.2 evaluate==0.4.1 posthog==6.7.11 schedulefree==1.4.1 nvidia-ml-py==12.560.30 wandb==0.22.0 \
	axolotl-contribs-lgpl axolotl-contribs-mit "protobuf<7" addict art backoff colorama distro einops fastcore fire gitdb \
	gitpython httpcore httpx llvmlite numba platformdirs python-dotenv scipy sentencepiece sentry-sdk six smmap termcolor

test-axolotl: $(VENV)/axolotl-$(AXOLOTL)/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTHON) -m pytest tests/frameworks/test_axolotl.py

$(VENV)/axolotl-%/.ready: $(READY)
	$(INSTALL) --upgrade --no-deps --target $(@D) axolotl==$* $(AXOLOTL_NEEDS)
	touch $@

# ms-swift imports most of what it can use.
SWIFT_NEEDS := transformers==5.17.0 trl==0.29.1 peft==0.20.0 datasets==4.8.4 "huggingface_hub<2" httpx httpcore addict \
	aiohappyeyeballs aiohttp aiosignal attrdict attrs binpacking cffi cryptography dacite einops frozenlist json-repair \
	modelscope modelscope-hub msgspec multidict nltk openai oss2 propcache pycparser rouge scipy sentencepiece \
	simplejson tiktoken yarl zstandard

test-swift: $(VENV)/swift-$(SWIFT)/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTHON) -m pytest tests/frameworks/test_swift.py

$(VENV)/swift-%/.ready: $(READY)
	$(INSTALL) --upgrade --no-deps --target $(@D) ms-swift==$* $(SWIFT_NEEDS)
	touch $@

# Modules of verl, OpenRLHF, VeOmni and Oumi that call this package, with the little that they import.
CALLERS := verl==0.9.1 openrlhf==0.11.2 veomni==0.1.12 oumi==0.9
CALLERS_NEED := trl==1.6.0 omegaconf jsonlines torchdata jsonschema jsonschema-specifications referencing rpds-py attrs

test-callers: $(VENV)/callers/.ready $(VENV)/deepspeed-$(DEEPSPEED)/.ready
	PYTHONPATH=$(abspath $(<D)):$(CURDIR)/$(VENV)/deepspeed-$(DEEPSPEED):$$PYTHONPATH $(PYTHON) -m pytest tests/frameworks/test_callers.py

$(VENV)/callers/.ready: $(READY)
	$(INSTALL) --upgrade --no-deps --target $(@D) $(CALLERS) $(CALLERS_NEED)
	touch $@

# torchao's int8 and NF4 weights and its float8 training; bitsandbytes' layers of 4 and 8 bits and its optimizers.
test-torchao: $(VENV)/torchao-$(TORCHAO)/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTHON) -m pytest tests/frameworks/test_torchao.py tests/bench/test_float8_bench.py

$(VENV)/torchao-%/.ready: $(READY)
	$(INSTALL) --upgrade --no-deps --target $(@D) torchao==$*
	touch $@

test-bitsandbytes: $(VENV)/bitsandbytes-$(BITSANDBYTES)/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTHON) -m pytest tests/frameworks/test_bitsandbytes.py

$(VENV)/bitsandbytes-%/.ready: $(READY)
	$(INSTALL) --upgrade --no-deps --target $(@D) bitsandbytes==$*
	touch $@

# torchtitan's Llama with single operators, NeMo AutoModel's patched, with the little that the two import.
OWN_MODELS := torchtitan==0.3.0 nemo-automodel==0.7.0
OWN_MODELS_NEED := spmd_types==0.2.3 torchdata==0.11.0 tyro==1.0.17 docstring_parser==0.18.0 einops==0.8.2 shtab==1.13.0 typeguard==4.6.0

test-single-operators: $(VENV)/own-models/.ready
	PYTHONPATH=$(abspath $(<D)):$$PYTHONPATH $(PYTHON) -m pytest tests/frameworks/test_single_operators.py

$(VENV)/own-models/.ready: $(READY)
	$(INSTALL) --upgrade --no-deps --target $(@D) $(OWN_MODELS) $(OWN_MODELS_NEED)
	touch $@

# What the targets of .ci/run install beside .venv. The first takes longest.
environments: $(VENV)/newest/.ready $(OLD)/.ready $(TRL:%=$(VENV)/trl-%/.ready) $(VENV)/megatron-$(MEGATRON)/.ready \
	$(VENV)/deepspeed-$(DEEPSPEED)/.ready $(KERNELS:%=$(VENV)/kernels-%/.ready) $(TRAINER:%=$(VENV)/transformers-%/.ready) \
	$(foreach version,$(KERNELS),$(VENV)/transformers-$(TRANSFORMERS_OF_$(version))/.ready) \
	$(VENV)/lightning-$(LIGHTNING)/.ready $(VENV)/llamafactory-$(LLAMA_FACTORY)/.ready $(VENV)/axolotl-$(AXOLOTL)/.ready \
	$(VENV)/callers/.ready $(VENV)/torchao-$(TORCHAO)/.ready $(VENV)/bitsandbytes-$(BITSANDBYTES)/.ready \
	$(VENV)/own-models/.ready $(VENV)/flyte-$(FLYTE)/.ready $(VENV)/loggers/.ready

$(VENV)/.ready: pyproject.toml
	@python3 -c "import sys; sys.exit(sys.version_info < (3, 10))" || { echo "make: Python 3.10 or newer is needed"; exit 1; }
	@python3 -m venv $(VENV) || { echo "make: python3 has no venv here; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Installing PyTorch, transformers and what the tests need into $(VENV), once. This takes some minutes."
	$(PYTHON) -m pip install --no-compile --upgrade $(TORCH) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) out
