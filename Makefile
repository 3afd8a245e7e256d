# Every target creates .venv by itself; a machine needs only Python 3.10 or later, make and, for the
# tests, a C++ compiler (torch-harmonics is built from source).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo demo-full test test-slow test-seeds test-all mutants versions clients clients-page clients-science dry-gpu soft-quick soft soft-soak soft-mutants programs soft-programs
.PHONY: check dist site pictures races soak bench gpu clean

# What make installs, and how long that takes, is said before pip begins, which is quiet.
SAY = @printf 'ebbtide: %s\n'

demo: $(VENV)/.demo  ## train a small FNO with and without offload, and compare; a minute or two
	@$(BIN)/ebbtide demo --quick

demo-full: $(VENV)/.demo  ## the same at 256 x 256 and with more steps, for figures to rely on; takes minutes
	@$(BIN)/ebbtide demo

TEST_PROCESSES ?= 2

# A run whose worker dies ends, as tests/conftest.py says: with a new worker xdist may wait for ever.
IN_PARALLEL = --numprocesses $(TEST_PROCESSES) --dist loadfile --max-worker-restart 0

# These need an accelerator, or other projects' frameworks.
NOT_HERE = $(addprefix --ignore=tests/,clients gpu softdevice)

test: $(VENV)/.dev  ## the tests of all that a change can break for a user; six minutes on two cores
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow" $(NOT_HERE)

# PART=2/4 runs the second of four parts.
PART ?= 1/1
TEST_SEEDS ?= 300

test-slow: $(VENV)/.dev  ## the slow tests
	EBBTIDE_PART=$(PART) $(BIN)/python -m pytest $(IN_PARALLEL) -m slow

test-seeds: $(VENV)/.dev  ## the random tests with TEST_SEEDS of each kind, and more interrupts
	EBBTIDE_SIMULATION_SEEDS=$(TEST_SEEDS) EBBTIDE_INTERRUPT_STRIDE=7 $(BIN)/python -m pytest \
		$(IN_PARALLEL) -m "not slow" tests/simulation tests/unit/test_interrupts.py

test-all: test test-slow test-seeds soft site dist versions clients  ## all of it, before a release

MUTANTS_FLAGS ?=

mutants: $(VENV)/.dev  ## random changes of the source, and how many of them make test notices; takes an hour
	$(BIN)/python tests/mutants/random_mutants.py $(MUTANTS_FLAGS)

VERSIONS_FLAGS ?=

versions:  ## test the core with the oldest and the newest supported torch and Python
	$(PYTHON) tests/versions/run_versions.py $(VERSIONS_FLAGS)

# The clients' frameworks have an environment of their own: 2 GiB that no other target needs.
CLIENTS := .venv-clients
CLIENTS_PIP := $(CLIENTS)/bin/python $(wordlist 2,$(words $(PIP)),$(PIP))

clients: $(CLIENTS)/.ready  ## train with real frameworks, with and without offload, and compare
	EBBTIDE_CLIENTS=all $(CLIENTS)/bin/python -m pytest tests/clients

clients-page: $(CLIENTS)/.ready  ## the same, and write docs/guides/clients.md
	PYTHONPATH=. $(CLIENTS)/bin/python tests/clients/write_page.py
	PYTHONPATH=. $(CLIENTS)/bin/python tests/clients/science_page.py scripts

SCIENCE := .venv-science
SCIENCE_PIP := $(SCIENCE)/bin/python $(wordlist 2,$(words $(PIP)),$(PIP))

clients-science: $(SCIENCE)/.ready  ## the same with Aurora, PhysicsNeMo and anemoi
	EBBTIDE_CLIENTS=science $(SCIENCE)/bin/python -m pytest tests/clients/test_science.py tests/clients/test_ways_weather.py
	PYTHONPATH=. $(SCIENCE)/bin/python tests/clients/science_page.py

dry-gpu: $(VENV)/.dev  ## the GPU suite's tests on a CPU, as far as that means something
	EBBTIDE_GPU_TESTS_ON=cpu $(BIN)/python -m pytest tests/gpu

# Each order in a process of its own. "random" draws a seed and prints it.
SOFT_ORDERS ?= threads compute-first copies-first random:1 random
SOFT = PYTHONPATH=tests/softdevice $(BIN)/python -m pytest -p softdevice.plugin
SOFT_FLAGS ?=

SOFT_QUICK = $(addprefix tests/softdevice/test_soft_, capacity.py memory.py operators.py plans.py \
	processes.py session.py streams.py training.py \
	weight_detach.py weight_uses.py weight_views.py weights.py)

# Built first, or each process would compile it.
soft-quick: $(VENV)/.dev  ## one order of it, and the quick tests of the software accelerator
	PYTHONPATH=tests/softdevice $(BIN)/python -c "import softdevice; softdevice.load('threads')"
	$(SOFT) $(IN_PARALLEL) --order random:1 $(SOFT_FLAGS) $(SOFT_QUICK) tests/gpu

soft: $(VENV)/.dev  ## the GPU suite's tests on an accelerator in software, in each order of execution
	$(SOFT) $(SOFT_FLAGS) tests/softdevice
	set -e; for order in $(SOFT_ORDERS); do $(SOFT) --order $$order $(SOFT_FLAGS) tests/gpu; done

EBBTIDE_PROGRAMS ?= 2000
PROGRAMS_FLAGS ?=
PROGRAMS = $(BIN)/python tests/programs/program_runs.py --count $(EBBTIDE_PROGRAMS)

programs: $(VENV)/.dev  ## generated training programs on a CPU, plainly and offloaded
	OMP_NUM_THREADS=1 $(PROGRAMS) $(PROGRAMS_FLAGS)

soft-programs: $(VENV)/.dev  ## the same on the accelerator in software, in each order of execution
	set -e; for order in threads compute-first copies-first random:N; do \
		OMP_NUM_THREADS=1 $(PROGRAMS) --order $$order $(PROGRAMS_FLAGS); done

SOFT_PROGRAMS ?= 1000

soft-soak: $(VENV)/.dev  ## random programs there: SOFT_PROGRAMS of each kind in each order
	EBBTIDE_SOFT_PROGRAMS=$(SOFT_PROGRAMS) $(SOFT) --timeout 0 $(SOFT_FLAGS) tests/softdevice/test_soft_programs.py

soft-mutants: $(VENV)/.dev  ## which missing guards the accelerator in software notices; then make races
	PYTHONPATH=tests/softdevice:tests/simulation $(BIN)/python tests/softdevice/soft_mutants.py

check: $(VENV)/.dev  ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel is built from the sdist, so the sdist is whole. WHEEL_VENV is made anew each time; it
# sees torch only through constraints.txt, as .venv does.
WHEEL_VENV := build/wheel-venv
WHEEL_PIP = $(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet

dist: $(VENV)/.dist  ## build sdist and wheel, install the wheel in a fresh environment, train with it
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_PIP) --constraint constraints.txt torch numpy
	$(WHEEL_PIP) --constraint constraints.txt dist/*.whl
	cd $(WHEEL_VENV) && bin/python -I $(CURDIR)/tests/package/train.py
	rm -rf build

SITE := build/site

# -E: the contents of a folder change when a page is added to it.
site: $(VENV)/.site  ## build the documentation, and check its links and the names of the reference
	rm -rf $(SITE)
	$(BIN)/python -m sphinx -E -W --keep-going --quiet --jobs auto -d build/doctrees docs $(SITE)
	$(BIN)/python docs/_site/site_check.py $(SITE)

pictures: $(VENV)/.dev  ## draw the documentation's pictures into docs/images; takes minutes
	$(BIN)/python docs/_site/site_pictures.py

races: $(VENV)/.dev  ## write docs/internals/races.md from the tags of the guards in the source
	$(BIN)/python tests/simulation/races_page.py

soak: $(VENV)/.dev  ## the engine under thousands of adversarial orders of copies
	EBBTIDE_SIMULATION_SEEDS=20000 $(BIN)/python -m pytest --timeout 0 tests/simulation
	EBBTIDE_INTERRUPT_STRIDE=1 $(BIN)/python -m pytest --timeout 0 tests/unit/test_interrupts.py

bench: $(VENV)/.dev  ## measure what needs no accelerator; results go to benchmarks/results
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.pinned
	$(BIN)/python -m benchmarks.rebuild
	$(BIN)/python -m benchmarks.rebuild_step
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.rss
	$(BIN)/python -m benchmarks.budget
	$(BIN)/python -m benchmarks.plan_search
	$(BIN)/python -m benchmarks.plan_paper
	$(BIN)/python -m benchmarks.plan_links
	$(BIN)/python -m benchmarks.report

# As found: no installs, no network. It takes the .venv if there is one, else the system's Python.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_FLAGS ?=

gpu:  ## test and measure on an accelerator, against every peer that is installed
	@$(GPU_PYTHON) -c "import torch" || { echo "make gpu needs a Python with torch: make gpu GPU_PYTHON=..."; exit 2; }
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.gpu $(GPU_FLAGS)

clean:
	rm -rf $(VENV) $(CLIENTS) $(SCIENCE) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist runs

# torch comes first and alone: packages that depend on it must find the pinned one.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ebbtide needs Python 3.10+")'
	$(SAY) 'installing torch and NumPy into $(VENV); the first time, this may take a few minutes'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) setuptools torch numpy
	@touch $@

$(VENV)/.dist: $(VENV)/.torch
	$(PIP) build twine
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(SAY) 'installing ebbtide and neuraloperator into $(VENV); this takes a while, too'
	@$(PIP) --editable ".[neuralop]"
	@touch $@

$(VENV)/.site: $(VENV)/.torch pyproject.toml
	$(PIP) --editable ".[docs]"
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --editable ".[neuralop,plots,dev]"
	$(PIP) --no-deps --no-build-isolation torch-harmonics
	# For the Trainers of Transformers and Lightning, and TRL, a peer of the GPU suite. All of them
	# ask for torch again.
	$(PIP) --no-deps trl accelerate lightning pytorch-lightning torchmetrics lightning-utilities
	$(PIP) datasets
	touch $@

# torch comes first here, too: none of the frameworks may replace it.
$(CLIENTS)/.ready: constraints.txt pyproject.toml tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS_PIP) setuptools torch numpy
	$(CLIENTS_PIP) --requirement tests/clients/requirements.txt
	$(CLIENTS_PIP) --no-build-isolation --editable .
	touch $@

# torch-scatter is compiled against the torch that is there.
$(SCIENCE)/.ready: constraints.txt pyproject.toml tests/clients/requirements-science.txt
	$(PYTHON) -m venv $(SCIENCE)
	$(SCIENCE_PIP) setuptools torch numpy
	$(SCIENCE_PIP) --requirement tests/clients/requirements-science.txt
	$(SCIENCE_PIP) --no-deps --requirement tests/clients/requirements-anemoi.txt
	$(SCIENCE_PIP) --no-deps --no-build-isolation torch-scatter
	$(SCIENCE_PIP) --no-build-isolation --editable .
	touch $@
