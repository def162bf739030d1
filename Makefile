# make demo   train the example: two processes, ZeRO-2, on the CPU or the GPUs of this machine
# make test   lint, types and all tests except the end-to-end ones (see test-programs)
# make test-programs   end-to-end tests: launches, exits, faults, the output shown in the documentation
# make test-tpu   the tests on XLA devices: torch_xla's CPU client in a separate environment
# make test-foreign   programs of other libraries (TRL, diffusers, timm, …), in a separate environment
# make campaign   the long tests, and a sample of mutants of the package on the tests that run them
# make test-older-torch   both suites on torch_xla's torch, 2.9
# make docs   the site, in site/; warnings are errors
# make test-newest-torch   the quick half of the suite, and parity on two processes, on the newest torch of the index
# make gpu   all that needs a GPU: checks, peaks of memory, speeds; in pieces, with the installed packages
# make benchmarks   the tables of benchmarks/RESULTS.md, on this machine
# make bench-quick   the benchmarks that a change is most likely to slow down, in five minutes on an idle machine
# All targets except gpu and clean first build .venv from constraints.txt. A second run installs nothing.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Skip pip's byte-compilation: most of the twenty thousand files are never imported.
INSTALL := -m pip install --quiet --no-compile
PIP    := $(BIN)/python $(INSTALL) --constraint constraints.txt

VENV_TPU    ?= .venv-tpu
VENV_NEWEST ?= .venv-newest
VENV_FOREIGN ?= .venv-foreign

.PHONY: demo docs test test-programs test-tpu test-older-torch test-newest-torch test-foreign check campaign mutants benchmarks clean
.PHONY: libaio test-tools gpu bench-quick

# The tests build DeepSpeed's C++ ops in their own environment, for its torch. The user's ops are not touched.
test test-programs campaign mutants test-foreign: export TORCH_EXTENSIONS_DIR := $(abspath $(VENV))/torch_extensions
test-older-torch: export TORCH_EXTENSIONS_DIR := $(abspath $(VENV_TPU))/torch_extensions
test-newest-torch: export TORCH_EXTENSIONS_DIR := $(abspath $(VENV_NEWEST))/torch_extensions

# The tests start hundreds of processes. Byte-code files keep each from compiling the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

# Twice the cores of a 2-core machine: tests that start processes mostly wait for them.
PYTEST := -m pytest --numprocesses 4 --dist loadgroup --no-loadscope-reorder

demo: $(VENV)/.installed libaio
	$(BIN)/zero-plugin demo

# On a new machine DeepSpeed's ops are built during the checks and the first tests. Tests that need ops wait for them.
test: $(VENV)/.installed-dev libaio test-tools
	$(BIN)/python tests/build_ops.py > /dev/null 2>&1 &
	$(MAKE) check
	$(BIN)/python $(PYTEST) -m "not campaign and not programs"

test-programs: $(VENV)/.installed-dev libaio test-tools
	$(BIN)/python $(PYTEST) -m "programs and not campaign"

# Trainings that change their path continue in the environment ZERO_PLUGIN_PYTHON. The second command runs tests that
# need only torch on this older torch, too. The third runs DeepSpeed on it: clipping and accumulation on each path that
# needs no C++ op. `make test-older-torch` runs everything. XLA compiles many programs that run a few times only, so its
# optimization is off.
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

# Downloads gigabytes for torch. If a newer torch was released since: rm -r .venv-newest first.
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

# A second start continues where the first one stopped.
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

# Without .venv, e.g. on a machine without a network, this uses the packages of the machine's Python.
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

# torch_xla is built for one torch, older than the one in constraints.txt. Each other torch has a separate environment,
# which reuses all other packages of .venv. `.torch` is a target of its own, so make can install it alongside .venv.
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

# The environment reuses the packages of .venv. A torchvision built for another torch is removed again, because
# transformers could not be imported with it. Without torchvision, only timm's program is skipped.
$(VENV_FOREIGN)/.installed: constraints.txt $(VENV)/.installed-dev
	$(PYTHON) -m venv $(VENV_FOREIGN)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(VENV_FOREIGN)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/other_environment.pth"
	$(VENV_FOREIGN)/bin/python $(INSTALL) --constraint constraints.txt \
		datasets diffusers dvclive sentence-transformers timm trackio trl
	$(VENV_FOREIGN)/bin/python -c 'import torchvision' 2> /dev/null \
		|| $(VENV_FOREIGN)/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

# Only offload to NVMe needs libaio's header, so a missing header stops nothing.
libaio:
	@if [ -e /usr/include/libaio.h ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	     && apt-get update -qq && apt-get install -y -qq libaio-dev; then :; \
	else echo "For offload to NVMe, type:  sudo apt-get install libaio-dev   (Fedora: sudo dnf install libaio-devel)"; fi

# Tests with several machines simulate them with network namespaces, as root. Tests of saves watch system calls. Without
# these tools both are skipped with a reason, and so are tests that need pdsh and openssh-server, or openmpi-bin.
test-tools:
	@if command -v strace >/dev/null && { command -v ip >/dev/null || [ "$$(id -u)" != 0 ]; }; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	     && apt-get update -qq && apt-get install -y -qq iproute2 strace; then :; \
	else echo "For some of the tests, type:  sudo apt-get install iproute2 strace"; fi
