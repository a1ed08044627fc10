# `make train` and `make test` do everything on a fresh machine; `make help` lists the rest.
PYTHON ?= python3
# What .venv was made with, once it is there. For something else, type `make clean setup ...`.
MADE = $(shell cat .venv/installed 2>/dev/null)
# Python 3.10, and an NVIDIA driver older than 580, need CONSTRAINTS=constraints-cu128.txt.
OLD_PYTHON = $(shell $(PYTHON) -c "import sys; print('-cu128' * (sys.version_info < (3, 11)))")
CONSTRAINTS ?= $(or $(word 1,$(MADE)),constraints$(OLD_PYTHON).txt)
TORCH ?= $(word 2,$(MADE))
BIN := .venv/bin
PIP = $(BIN)/pip install --no-compile --disable-pip-version-check $(if $(MAKE_TERMOUT),,--quiet)
unexport PYTHONPATH  # A cluster's modules may set it, and pip would find packages there.
LAUNCH = OMP_NUM_THREADS=1 $(BIN)/accelerate-launch --config_file accelerate_configs
# All visible GPUs, or else two CPU processes. `train` does not compare on a single GPU.
PROCESSES = $(shell $(BIN)/python -c "import torch; print(torch.cuda.device_count() or 2)")
RNN = train_mnist_rnn.py --dataset digits --num_epochs 10 --dropout 0 --per_device_train_batch_size
TINY = train_bert_squad.py --model_name_or_path tests/data/tiny_bert --from_scratch \
	--train_file tests/data/squad_v1.json --validation_file tests/data/squad_v1.json \
	--learning_rate 1e-3 --dropout 0 --per_device_train_batch_size 8
.PHONY: help setup dev train sweep test slurm canary lint bench clean
.NOTPARALLEL:  # `make clean setup` cleans first.

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12
setup: .venv/installed  ## install what the scripts, report and lab need; TORCH=cpu: without CUDA
	@[ "$(strip $(CONSTRAINTS) $(TORCH))" = "$(MADE)" ] || \
		echo "note: .venv stays as it is ($(MADE)). To replace it, type 'make clean' first" >&2
dev: .venv/installed-dev  ## install what tests and lint need, too

# A .venv that is a link belongs to somebody else: it is used, and never changed.
ifneq (,$(if $(filter clean,$(MAKECMDGOALS)),,$(shell readlink .venv)))
.venv/installed .venv/installed-dev:
	$(error .venv is a link that lacks packages: 'make dev' where it was made, or 'make clean' here)
else
# The last line shows that all is there. What another Python left in .venv goes. pip would compile
# on one core, and also what nobody imports. Some of the files are templates, not Python.
.venv/installed: requirements.txt requirements-report.txt constraints.txt constraints-cu128.txt
	@$(PYTHON) -c "import sys; sys.version_info < (3, 10) and exit('error: Python 3.10 is needed')"
	@echo "Installing into .venv, once. This takes 10 to 20 minutes, near a mirror 3 or 4:"
	$(PYTHON) -m venv $$([ "$$($(BIN)/python -V 2>&1)" = "$$($(PYTHON) -V 2>&1)" ] || \
		echo --clear) .venv
	[ -z "$(TORCH)" ] || $(PIP) -c $(CONSTRAINTS) --no-deps torch torchvision \
		--index-url https://download.pytorch.org/whl/$(TORCH) || { echo "error: no torch from" \
		"PyTorch's index. Behind a mirror of PyPI, leave out TORCH=$(TORCH)" >&2; exit 1; }
	$(PIP) -c $(CONSTRAINTS) -r requirements.txt -r requirements-report.txt
	-$(BIN)/python -m compileall -qq -j4 -x '/tests?/|/transformers/models/(?!auto/|bert/)' .venv/lib
	echo $(CONSTRAINTS) $(TORCH) > $@
.venv/installed-dev: .venv/installed requirements-dev.txt
	$(PIP) -c $(CONSTRAINTS) -r requirements-dev.txt && touch $@
endif

train: setup  ## train an RNN on one device and under DDP, and compare: no download, no GPU needed
	@n=$(PROCESSES); [ $$n != 1 ] || { n=2; export CUDA_VISIBLE_DEVICES=; }; set -ex; \
	run=runs/train-$$(date +%Y%m%d-%H%M%S); \
	$(LAUNCH)/baseline.yaml $(RNN) $$((32 * n)) --output_dir $$run/baseline; \
	$(LAUNCH)/ddp.yaml --num_processes $$n $(RNN) 32 --output_dir $$run/ddp; \
	$(BIN)/python tools/compare.py $$run/baseline $$run/ddp; \
	CUDA_VISIBLE_DEVICES= $(LAUNCH)/ddp.yaml docs/lab/crossover.py
	@echo "docs/lab.md explains it."
train-bert: setup  ## train a tiny BERT: no download, no GPU needed; FLAGS="..." adds flags
	$(LAUNCH)/ddp.yaml --num_processes $(PROCESSES) $(TINY) --num_epochs 20 $(FLAGS)
sweep: setup  ## time every strategy here with both scripts, without Slurm; SWEEP="--repeats 3"
	export PATH="$$PWD/$(BIN):$$PATH" to=runs/sweep-$$(date +%Y%m%d-%H%M%S) failed=0; \
	sbatch/sweep.sh --local $(SWEEP) --output_dir $$to/mnist train_mnist_rnn.py \
		--dataset digits --num_epochs 30 $(FLAGS) || failed=1; \
	sbatch/sweep.sh --local $(SWEEP) --output_dir $$to/bert $(TINY) \
		--max_train_samples 112 --num_epochs 8 $(FLAGS) || failed=1; \
	python tools/report.py $$to && exit $$failed

test: dev  ## the tests of the scripts, the YAMLs, the report and README; minutes
	$(BIN)/python -m pytest -n 2
test-all: dev  ## all tests: also of Slurm, the lab, the docs, the notebook, other machines
	$(BIN)/python -m pytest -n 2 -m "not matrix"
slurm:  ## install Debian's Slurm and Chromium for the tests of sbatch/ and report.html; as root
	apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
		slurmctld slurmd slurm-client iproute2 chromium
test-faults: dev  ## break runs on a two-node Slurm in every way; as root, half an hour
	$(BIN)/python -m pytest -m slow tests/test_faults.py
test-gpu: dev  ## prove it on this machine's GPUs, and write runs/gpu/gpu-report.md
	mkdir -p runs/gpu
	bash -o pipefail -c "$(BIN)/python -m pytest -m gpu | tee runs/gpu/gpu-report.md"
canary: dev  ## find out which releases train right; ROWS="accelerate==1.14.0": these; hours
	PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python benchmarks/versions.py --rows "$(ROWS)"
lint: dev  ## check form and style
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/mypy && $(BIN)/shellcheck -x sbatch/*.sh
bench: dev  ## measure speed and accuracy of the RNN; needs MNIST in data/, takes minutes
	$(BIN)/python benchmarks/mnist.py
bench-gpu: dev  ## measure BERT-base on one GPU in bf16, beside transformers' Trainer
	$(BIN)/python benchmarks/bert.py --gpu $(BENCH)
clean:  ## remove .venv; of a link, the link only
	rm -rf .venv
