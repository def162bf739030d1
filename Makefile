# make demo   train the example: two processes, ZeRO-2, on the CPU or the GPUs of this machine
# make test   lint, types and the tests, but for those that start programs as a user does
# make test-programs   those: launches, ends, faults, what the documentation prints
# make test-tpu   the tests on XLA devices: torch_xla's CPU client in an environment of its own
# make test-foreign   programs of other libraries (TRL, diffusers, timm, …), in an environment of their own
# make campaign   the long tests, and a sample of mutants of the package on the tests that run them
# make test-older-torch   both suites on torch_xla's torch, 2.9
# make docs   the site, in site/; warnings are errors
# make test-newest-torch   the quick half of the suite, and parity on two processes, on the newest torch of the index
# make gpu   all that needs a GPU: checks, peaks of memory, speeds; in pieces, with what Python has installed
# make benchmarks   the tables of benchmarks/RESULTS.md, on this machine
# make bench-quick   those of them that a change may spoil, in five minutes on a quiet machine
# They build .venv first, from constraints.txt; a second run installs nothing.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Of twenty thousand files most are never imported: Python compiles those that are, and pip none.
INSTALL := -m pip install --quiet --no-compile
PIP    := $(BIN)/python $(INSTALL) --constraint constraints.txt

VENV_TPU    ?= .venv-tpu
VENV_NEWEST ?= .venv-newest
VENV_FOREIGN ?= .venv-foreign

.PHONY: demo docs test test-programs test-tpu test-older-torch test-newest-torch test-foreign check campaign mutants benchmarks clean
.PHONY: libaio test-tools gpu bench-quick

# The tests build DeepSpeed's C++ ops for their own torch, beside it, and leave the user's alone.
test test-programs campaign mutants test-foreign: export TORCH_EXTENSIONS_DIR := $(abspath $(VENV))/torch_extensions
test-older-torch: export TORCH_EXTENSIONS_DIR := $(abspath $(VENV_TPU))/torch_extensions
test-newest-torch: export TORCH_EXTENSIONS_DIR := $(abspath $(VENV_NEWEST))/torch_extensions

# Hundreds of processes are started: none of them compiles the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

# Twice as many as there are processors here: tests that start processes mostly wait for them.
PYTEST := -m pytest --numprocesses 4 --dist loadgroup --no-loadscope-reorder

demo: $(VENV)/.installed libaio
	$(BIN)/zero-plugin demo

# On a new machine DeepSpeed's ops are built beside the checks and the first tests; what needs them waits for them.
test: $(VENV)/.installed-dev libaio test-tools
	$(BIN)/python tests/build_ops.py > /dev/null 2>&1 &
	$(MAKE) check
	$(BIN)/python $(PYTEST) -m "not campaign and not programs"

test-programs: $(VENV)/.installed-dev libaio test-tools
	$(BIN)/python $(PYTEST) -m "programs and not campaign"

# Trainings that change their path go on in the other environment. What runs on a plain torch is tried on this older
# one too, and so is DeepSpeed: clipping and accumulation on each path that needs no C++ op; `make test-older-torch` has
# all of it. XLA compiles much that runs a few times, so it does not optimize.
test-tpu: $(VENV_TPU)/.installed $(VENV)/.installed
	XLA_FLAGS=--xla_backend_optimization_level=0 ZERO_PLUGIN_PYTHON=$(abspath $(BIN))/python \
	$(VENV_TPU)/bin/python -m pytest --confcutdir tests/xla --numprocesses 2 tests/xla
	$(VENV_TPU)/bin/python $(PYTEST) -m "not campaign and not processes" \
		tests/test_accelerator.py tests/test_first_steps.py tests/test_compilation.py tests/test_nested.py \
		tests/data tests/utils/test_trees.py
	$(VENV_TPU)/bin/python $(PYTEST) -m "not campaign" tests/parity \
		-k "(clip or short-window) and not -cpu and not nvme and not bf16 and not pair"

test-older-torch: $(VENV_TPU)/.installed libaio test-tools
	$(VENV_TPU)/bin/python $(PYTEST) --ignore tests/xla -m "not campaign"

# A torch of gigabytes. Where a newer one has come out since: rm -r .venv-newest first.
test-newest-torch: $(VENV_NEWEST)/.installed libaio
	$(VENV_NEWEST)/bin/python $(PYTEST) --ignore tests/xla -m "not campaign and not processes"
	$(VENV_NEWEST)/bin/python $(PYTEST) -m "not campaign" tests/parity

test-foreign: $(VENV_FOREIGN)/.installed libaio
	$(VENV_FOREIGN)/bin/python -m pytest --numprocesses 2 --dist loadgroup tests/foreign

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

campaign: $(VENV)/.installed-dev libaio test-tools
	HYPOTHESIS_PROFILE=campaign $(BIN)/python -m pytest tests/cli/test_questionnaire.py
	$(BIN)/python -m pytest -m campaign
	$(BIN)/python $(PYTEST) --unpooled 1 -m processes tests/strategies tests/several_models tests/transformers tests/parity
	$(MAKE) test-foreign
	$(MAKE) mutants

# A second start goes on from where the first one was stopped.
mutants: $(VENV)/.installed-dev libaio
	$(BIN)/python tests/mutants/campaign.py

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

benchmarks: $(VENV)/.installed
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/launch.py
	$(BIN)/python benchmarks/first_step.py
	$(BIN)/python benchmarks/errors.py
	$(BIN)/python benchmarks/step.py --sizes tiny
	$(BIN)/python benchmarks/step.py --sizes 5M --steps 4 --pairs 15

# Where there is no network, the environment is what the machine's Python has.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu/kit.py $(if $(PIECES),--pieces $(PIECES))

bench-quick: export ZERO_PLUGIN_QUIET := 1
bench-quick: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/import_time.py --pairs 5
	$(BIN)/python benchmarks/launch.py --pairs 3 --processes 2
	$(BIN)/python benchmarks/step.py --sizes tiny --paths single ddp zero2 zero3 --pairs 8
	$(BIN)/python benchmarks/many_tensors.py --rounds 5 --windows 8
	$(BIN)/python benchmarks/collectives.py --rounds 5
	$(BIN)/python benchmarks/checkpoint.py --gigabytes 0.1 --rounds 1 --cases "stage 2, fp32"
	$(BIN)/python benchmarks/shuffled.py --samples 1000000
	$(BIN)/python benchmarks/plan.py --repeats 1

clean:
	rm -rf $(VENV) $(VENV_TPU) $(VENV_NEWEST) $(VENV_FOREIGN) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis demo_output examples_output site

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[pictures]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[pictures,dev,docs]'
	@touch $(VENV)/.installed $@

# torch_xla is built for one torch, older than that of constraints.txt. Another torch has an environment of its own, and
# all else is the other environment's, beside which it can be installed.
$(VENV_TPU)/.torch: torch := torch==2.9.0 torch-xla==2.9.0 numpy
$(VENV_NEWEST)/.torch: torch := --upgrade torch numpy
$(VENV_TPU)/.torch $(VENV_NEWEST)/.torch: constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -v '^torch==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python $(INSTALL) --constraint $(@D)/constraints.txt $(torch)
	@touch $@

$(VENV_TPU)/.installed $(VENV_NEWEST)/.installed: %/.installed: %/.torch pyproject.toml $(VENV)/.installed-dev
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/other_environment.pth"
	$(@D)/bin/python $(INSTALL) --constraint $(@D)/constraints.txt --no-deps --editable .
	@touch $@

# What .venv has is used from there. A torchvision that was built for another torch is removed again: it would keep
# transformers from being imported, and without it timm's program alone is skipped.
$(VENV_FOREIGN)/.installed: constraints.txt $(VENV)/.installed-dev
	$(PYTHON) -m venv $(VENV_FOREIGN)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(VENV_FOREIGN)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/other_environment.pth"
	$(VENV_FOREIGN)/bin/python $(INSTALL) --constraint constraints.txt \
		datasets diffusers dvclive sentence-transformers timm trackio trl
	$(VENV_FOREIGN)/bin/python -c 'import torchvision' 2> /dev/null \
		|| $(VENV_FOREIGN)/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

# Offload to NVMe needs libaio's header. All else runs without it, so its absence stops nothing.
libaio:
	@if [ -e /usr/include/libaio.h ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	     && apt-get update -qq && apt-get install -y -qq libaio-dev; then :; \
	else echo "For offload to NVMe, type:  sudo apt-get install libaio-dev   (Fedora: sudo dnf install libaio-devel)"; fi

# Tests of several machines make them of network namespaces, as root, and those of saves watch their system calls.
# Without these tools they are skipped and say so; so are those that need pdsh and openssh-server, or openmpi-bin.
test-tools:
	@if command -v strace >/dev/null && { command -v ip >/dev/null || [ "$$(id -u)" != 0 ]; }; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	     && apt-get update -qq && apt-get install -y -qq iproute2 strace; then :; \
	else echo "For some of the tests, type:  sudo apt-get install iproute2 strace"; fi
