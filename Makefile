# `make train` and `make test` do everything on a fresh machine; `make help` lists the rest.
PYTHON ?= python3
# The pinned set: that of .venv, if there is one. Python 3.10 gets the older set. An NVIDIA driver
# older than 580 needs it too: make train CONSTRAINTS=constraints-cu128.txt
# Without a GPU, TORCH=cpu takes torch's build for CPUs. Once .venv is there, it decides.
# `make clean setup` makes a new one.
STAMP := $(if $(filter clean,$(firstword $(MAKECMDGOALS))),,$(wildcard .venv/installed))
MADE := $(if $(STAMP),$(shell cat $(STAMP)))
# A link to a complete .venv belongs to somebody else: make uses it, and never changes it.
LINKED := $(if $(STAMP),$(shell [ ! -L .venv ] || readlink -f .venv))
OLD_PYTHON = $(shell $(PYTHON) -c "import sys; print('-cu128' * (sys.version_info < (3, 11)))")
CONSTRAINTS ?= $(or $(word 1,$(MADE)),constraints$(OLD_PYTHON).txt)
TORCH ?= $(word 2,$(MADE))
BUILD := $(if $(MADE),$(word 2,$(MADE)),$(TORCH))
BIN := .venv/bin
# Modules of a cluster may set it. pip would take what it names for installed.
unexport PYTHONPATH
# A terminal shows pip's progress; a log gets the commands only.
PIP = $(BIN)/pip install --disable-pip-version-check $(if $(MAKE_TERMOUT),,--quiet)
REPEATS = 2
# More flags of the scripts, for example: make train-bert FLAGS="--num_epochs 40"
FLAGS =
STRATEGIES = baseline dp ddp fsdp zero2 zero3
SWEEP := runs/sweep-$(shell date +%Y%m%d-%H%M%S)
DIGITS = train_mnist_rnn.py --dataset digits --num_epochs 30
SHORT = train_mnist_rnn.py --dataset digits --num_epochs 10 --dropout 0
TINY = train_bert_squad.py --model_name_or_path tests/data/tiny_bert --from_scratch \
	--train_file tests/data/squad_v1.json --validation_file tests/data/squad_v1.json \
	--learning_rate 1e-3 --dropout 0 --per_device_train_batch_size 8
# All visible GPUs, or else two CPU processes. `train` does not compare on a single GPU.
PROCESSES = $(shell $(BIN)/python -c "import torch; print(torch.cuda.device_count() or 2)")

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/installed  ## make .venv, install what the scripts, report and lab need; TORCH=cpu: without CUDA
	@read made <$<; [ "$$made" = "$(strip $(CONSTRAINTS) $(TORCH))" ] || \
		echo "note: .venv stays as it is ($$made); to replace it, type 'make clean' first" >&2

dev: .venv/installed-dev

ifdef LINKED
.venv/installed: ;

.venv/installed-dev:
	$(if $(wildcard $@),,$(error .venv is a link, and $(LINKED) lacks the packages for tests and \
		lint. Type 'make dev' where it was made, or 'make clean dev' for a .venv of your own))
else
# .venv may be a link to another disk. What another Python left in it goes. The stamp comes last.
# pip would compile on one core, also what nobody imports. Some files are templates, not Python.
.venv/installed: requirements.txt requirements-report.txt $(CONSTRAINTS)
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and \
		'error: Python 3.10 or later is needed: make PYTHON=python3.12 ...')"
	@echo "Installing into .venv, once. This takes 10 to 20 minutes, near a mirror 3 or 4:"
	$(PYTHON) -m venv $$([ "$$($(BIN)/python -V 2>&1)" = "$$($(PYTHON) -V 2>&1)" ] || \
		echo --clear) "$$(readlink -f .venv)"
	$(PIP) --no-compile -c $(CONSTRAINTS) torch torchvision $(if $(BUILD),--no-deps \
		--index-url https://download.pytorch.org/whl/$(BUILD))
	$(PIP) --no-compile -c $(CONSTRAINTS) -r requirements.txt -r requirements-report.txt
	$(BIN)/python -m compileall -qq -j4 \
		-x '/tests?/|/transformers/models/(?!auto/|bert/)[^/]*/' .venv/lib || true
	$(BIN)/python -c "import torch, torchvision, accelerate"
	echo $(CONSTRAINTS) $(BUILD) > $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(PIP) --no-compile -c $$(cut -d' ' -f1 .venv/installed) -r requirements-dev.txt
	touch $@
endif

train: setup  ## train an RNN on one device and under DDP, and compare: no download, no GPU needed
	@n=$(PROCESSES); [ $$n != 1 ] || { n=2; export CUDA_VISIBLE_DEVICES=; }; \
	run=runs/train-$$(date +%Y%m%d-%H%M%S); export OMP_NUM_THREADS=1; set -ex; \
	$(BIN)/accelerate-launch --config_file accelerate_configs/baseline.yaml $(SHORT) \
		--per_device_train_batch_size $$((32 * n)) --output_dir $$run/baseline; \
	$(BIN)/accelerate-launch --config_file accelerate_configs/ddp.yaml --num_processes $$n \
		$(SHORT) --per_device_train_batch_size 32 --output_dir $$run/ddp; \
	$(BIN)/python docs/lab/compare.py $$run/baseline $$run/ddp; \
	CUDA_VISIBLE_DEVICES= $(BIN)/accelerate-launch --config_file accelerate_configs/ddp.yaml \
		docs/lab/crossover.py
	@echo "docs/lab.md explains it."

train-bert: setup  ## train a tiny BERT: no download, no GPU needed; FLAGS="..." adds flags
	OMP_NUM_THREADS=1 $(BIN)/accelerate-launch --config_file accelerate_configs/ddp.yaml \
		--num_processes $(PROCESSES) $(TINY) --num_epochs 20 $(FLAGS)

# Two files of tests at a time: one computes while the other waits.
test: dev  ## the tests of the scripts, the YAMLs, the report and README; minutes
	$(BIN)/python -m pytest -n 2

test-all: dev  ## all tests: also of Slurm, the lab, the docs, the notebook, other machines
	$(BIN)/python -m pytest -n 2 -m "not matrix"

slurm:  ## install Debian's Slurm and Chromium for the tests of sbatch/ and report.html; as root
	apt-get update
	DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
		slurmctld slurmd slurm-client iproute2 chromium

test-faults: dev  ## break runs on a two-node Slurm in every way; as root, half an hour
	$(BIN)/python -m pytest -m slow tests/test_faults.py

test-gpu: dev  ## prove it on this machine's GPUs, and write runs/gpu/gpu-report.md
	mkdir -p runs/gpu
	bash -o pipefail -c "$(BIN)/python -m pytest -m gpu | tee runs/gpu/gpu-report.md"

canary: dev  ## find out which releases train right; ROWS="accelerate==1.14.0": these; hours
	PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python benchmarks/versions.py --rows "$(ROWS)"

sweep: setup  ## time every strategy on this machine with both scripts, without Slurm, and report
	export PATH="$$PWD/$(BIN):$$PATH" failed=0 && \
	sweep="sbatch/sweep.sh --local --repeats $(REPEATS)" && \
	{ $$sweep --strategies "$(STRATEGIES)" --output_dir $(SWEEP)/mnist $(DIGITS) $(FLAGS) || \
		failed=1; } && \
	{ $$sweep --strategies "$(STRATEGIES)" --output_dir $(SWEEP)/bert $(TINY) \
		--max_train_samples 112 --num_epochs 8 $(FLAGS) || failed=1; } && \
	python report.py $(SWEEP) && exit $$failed

lint: dev  ## check form and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/shellcheck -x sbatch/*.sh

bench: dev  ## measure speed and accuracy of the RNN; needs MNIST in data/, takes minutes
	$(BIN)/python benchmarks/mnist.py

bench-gpu: dev  ## measure BERT-base on one GPU in bf16, beside transformers' Trainer
	$(BIN)/python benchmarks/bert.py --gpu $(BENCH)

clean:  ## remove .venv; of a link, the link only
	rm -rf .venv

.NOTPARALLEL:  # `make clean setup` cleans first.
.PHONY: help setup dev train train-bert sweep test test-all slurm \
	test-faults test-gpu canary lint bench bench-gpu clean
