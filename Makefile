# `make demo` and `make test` need nothing but python3 (3.11 or newer, with pip and venv) and make.
# Everything they install goes into .venv; everything they download, into .cache.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Only errors are printed. The stamps of VENV say what is installed: they are as old as the
# pyproject.toml they were made from, so that nothing happens where it did not change. Bytecode is
# compiled when a module is first imported: most of what packages bring never is. Kernels are
# compiled in VENV itself: an environment for that alone would be filled with the same each time.
PIP_ARGS := install -qq --disable-pip-version-check --no-compile
PIP := $(RUN) -m pip $(PIP_ARGS)
INSTALL := $(PIP) --no-build-isolation --editable
PYTEST_ARGS ?=
SECONDS ?= 60

# Installations share one environment, and must not run at once: `make -j lint test` is serial too.
.NOTPARALLEL:
# Bytecode is kept in any case: tests start hundreds of processes, which would compile all they import.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup kernels demo docs test test-changed test-full lint fuzz bench bench-full bench-tf bench-tflite bench-zoo bench-open bench-sequences bench-kernels bench-disturbed bench-start bench-unequal bench-generation bench-quantize proto wheels clean

# Another Python than the environment's, if it is asked for on the command line, replaces that.
ifeq ($(origin PYTHON),command line)
VERSION := import sys; print(sys.version_info[:2])
$(shell test ! -e $(RUN) || test "$$($(PYTHON) -c '$(VERSION)')" = "$$($(RUN) -c '$(VERSION)')" \
	|| rm -rf $(VENV))
endif

help:
	@echo "make demo    say what types files of this repository have, with a neural network"
	@echo "make test    run all tests; make test PYTEST_ARGS='tests/session/test_session.py -x' runs some"
	@echo "make test-changed  run the tests of what differs from main, by tools/changed_tests.py"
	@echo "make test-full  run what 'make test' runs only a sample of: sweeps, and random examples"
	@echo "make fuzz    try damaged models and odd nodes for SECONDS=60; what breaks a promise goes to .cache/fuzz"
	@echo "make lint    check format, style and types"
	@echo "make docs    build the documentation into build/site, refusing links that lead nowhere"
	@echo "make bench   measure against other runtimes, write bench/results.md; a few whole models"
	@echo "make bench-full  measure all models against all peers (an hour or two), write bench/models.md"
	@echo "make bench-tflite  measure TFLite models against LiteRT and onert, write bench/tflite.md"
	@echo "make bench-open  measure where opening small models spends its time, write bench/open.md"
	@echo "make bench-sequences  measure attention, decoding and loops, write bench/sequences.md"
	@echo "make bench-kernels  measure single operations of models, write bench/kernels.md"
	@echo "make bench-disturbed  measure runs while another process takes a core, write bench/disturbed.md"
	@echo "make bench-start  measure processes from start to first answer, write bench/start.md"
	@echo "make bench-unequal  measure texts of unequal lengths, write bench/unequal.md"
	@echo "make bench-generation  measure text generation, write bench/generation.md"
	@echo "make bench-quantize  quantize models and measure what comes of it (an hour), write bench/quantize.md"
	@echo "make bench-tf  measure control flow against TensorFlow, write bench/frames.md"
	@echo "make bench-zoo  make models with many exporters and measure them (hours), write bench/zoo.md"
	@echo "make proto   generate the messages of ONNX's and TensorFlow's files from their declarations"
	@echo "make kernels compile the kernels in C that have changed"
	@echo "make wheels  build wheels for Linux, macOS and Windows into dist/, by tools/wheels.py"
	@echo "make setup   make .venv with Penstock in it, which all of these do first"
	@echo "make clean   remove all that these made"

setup: $(VENV)/.installed

demo: setup
	$(RUN) examples/filetypes.py

# One worker more than cores of a small machine: some tests wait for processes and deadlines.
test: $(VENV)/.installed-test
	$(RUN) -m pytest -n 3 $(PYTEST_ARGS)

# Without changes there are no tests to run, and pytest without files would run all.
test-changed: $(VENV)/.installed-test
	@tests=$$($(RUN) -m tools.changed_tests) && if [ -n "$$tests" ]; then \
		$(RUN) -m pytest $(PYTEST_ARGS) $$tests; else echo "no tests of what has changed"; fi

test-full: $(VENV)/.installed-test
	$(RUN) -m pytest -n 2 -m 'full or hypothesis' --hypothesis-profile=full $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict
	@echo "open build/site/index.html, or serve it: python -m http.server -d build/site"

# A new seed each time, which is printed: python -m tools.fuzz --seed N --case NUMBER repeats a case.
fuzz: $(VENV)/.installed-test
	$(RUN) -m tools.fuzz --seconds $(SECONDS) --out .cache/fuzz

bench: $(VENV)/.installed-bench
	$(RUN) -m bench.run
	$(RUN) -m bench.versus --quick

bench-full: $(VENV)/.installed-bench-full
	$(RUN) -m bench.versus

bench-open: $(VENV)/.installed
	$(RUN) -m bench.open

bench-sequences: $(VENV)/.installed-bench-full
	$(RUN) -m bench.sequences

bench-kernels: $(VENV)/.installed-bench-full
	$(RUN) -m bench.kernels

bench-disturbed: $(VENV)/.installed-bench-full
	$(RUN) -m bench.disturbed

bench-start: $(VENV)/.installed-bench-full
	$(RUN) -m bench.start

bench-unequal: $(VENV)/.installed-bench-full
	$(RUN) -m bench.unequal

bench-generation: $(VENV)/.installed-bench-generation
	$(RUN) -m bench.generation

bench-quantize: $(VENV)/.installed-bench-full
	$(RUN) -m bench.quantize_exports
	$(RUN) -m bench.quantize

bench-tflite: $(VENV)/.installed-bench $(VENV)/.installed-bench-tflite
	$(RUN) -m bench.tflite

# TensorFlow has an environment of its own, so that its requirements constrain nothing else.
TENSORFLOW := .venv-tf

bench-tf: $(VENV)/.installed-bench $(TENSORFLOW)/.installed
	$(RUN) -m bench.frames --tensorflow $(TENSORFLOW)/bin/python

# So have the exporters of the zoo, which write its models into .cache.
EXPORTERS := .venv-zoo

bench-zoo: $(VENV)/.installed-bench $(EXPORTERS)/.installed
	$(EXPORTERS)/bin/python -m bench.zoo generate
	$(RUN) -m bench.zoo check
	$(RUN) -m bench.zoo report

$(TENSORFLOW)/.installed: EXTRA := bench-tf
$(EXPORTERS)/.installed: EXTRA := bench-zoo
$(TENSORFLOW)/.installed $(EXPORTERS)/.installed: pyproject.toml
	@echo "installing what $(EXTRA) needs into $(@D)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check \
		$$($(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
		print(*project["project"]["optional-dependencies"]["$(EXTRA)"])')
	@touch $@

# The compiler of protobuf 6.31.1, the oldest that Penstock works with.
TENSORFLOW_PROTO := penstock/frontends/tensorflow/proto/graphdef.proto
ONNX_PROTO := penstock/frontends/onnx/proto/onnx.proto

proto:
	@$(PYTHON) -m venv .cache/protoc
	@.cache/protoc/bin/python -m pip install -qq --disable-pip-version-check grpcio-tools==1.75.1
	cd src && ../.cache/protoc/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
		$(TENSORFLOW_PROTO)
	cd src && ../.cache/protoc/bin/python -m grpc_tools.protoc -I. --pyi_out=. \
		--descriptor_set_out=$(ONNX_PROTO:.proto=.binpb) $(ONNX_PROTO)

# An environment with what kernels are compiled with. Python's own pip fills it, and installs another:
# ensurepip would take three seconds.
BUILDS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])

$(VENV)/.builds: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 \
	or newer, and this is " + sys.version.split()[0] + ": make PYTHON=python3.11, say")'
	@echo "installing Penstock into $(VENV)"
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $(RUN) $(PIP_ARGS) pip $$($(PYTHON) -c '$(BUILDS)')
	@touch $@

# Compiled kernels are part of the installation.
KERNELS := setup.py $(wildcard src/penstock/host/c/* src/penstock/backends/native/c/*/*)

kernels: setup
	$(RUN) setup.py -q build_ext --inplace
	$(RUN) -m tools.families

# Into dist/.
wheels: $(VENV)/.installed-wheels
	$(RUN) -m tools.wheels

# Kernels are compiled while what Penstock needs is installed.
NEEDS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"])

$(VENV)/.installed: $(VENV)/.builds $(KERNELS)
	@$(INSTALL) . --no-deps & kernels=$$!; \
	$(PIP) $$($(PYTHON) -c '$(NEEDS)'); needs=$$?; wait $$kernels && exit $$needs
	@touch $@

# Tests run the kernels of all instruction sets that this machine has, unless some are named.
PENSTOCK_LEVELS ?= all
$(VENV)/.installed-test: export PENSTOCK_LEVELS := $(PENSTOCK_LEVELS)

$(VENV)/.installed-%: pyproject.toml | $(VENV)/.installed
	@echo "installing what $* needs into $(VENV)"
	@$(INSTALL) '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) $(TENSORFLOW) $(EXPORTERS) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	rm -rf src/penstock_runtime.egg-info src/penstock/host/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
