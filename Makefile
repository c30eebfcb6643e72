# make demo and make test need python3 (3.10 to 3.13) with venv and pip; everything else they install into .venv.

PYTHON ?= python3
TORCH := torch==2.13.0
VENV := .venv
READY := $(VENV)/.ready
PIP = $(VENV)/bin/python -m pip -qq --disable-pip-version-check
GPU_VENV := .venv-gpu
DOCS_VENV := .venv-docs
OLDEST := .venv-oldest

# True if this python3 brings a torch that sees an NVIDIA GPU: then that torch is used, not one from constraints.txt.
HAS_GPU := $(PYTHON) -c "import torch; assert torch.version.cuda and torch.cuda.is_available()" 2>/dev/null

.DEFAULT_GOAL := help
.PHONY: help demo docs lint test test-all test-oldest matrix oracle gpu-test sanitize hostsuites bench wheel clean

help:
	@echo "make demo      train a GAT with and without gnnaccel   (ARGS='--data cora --epochs 50')"
	@echo "make docs      the documentation site, in build/site/index.html; a warning fails it"
	@echo "make lint      ruff (.ci/ruff.toml) and mypy (pyproject.toml) over the code"
	@echo "make test      a chosen set of the tests that need no GPU, in minutes  (ARGS='-k code_graph')"
	@echo "make test-all  all tests that need no GPU"
	@echo "make test-oldest  a part of them with the oldest PyG that is supported"
	@echo "make matrix    a core of them with the oldest and newest torch and PyG, for each Python found (ARGS='--python 3.11')"
	@echo "make oracle    random cases against the hosts         (ARGS='--seconds 600 --seed 7')"
	@echo "make gpu-test  the tests on a GPU, recorded in tests/gpu_record.json"
	@echo "make sanitize  the kernel tests under compute-sanitizer (ARGS='-k test_additive')"
	@echo "make hostsuites HOST=pyg ARGS='--source DIR'  PyG's own tests (or dgl's), natively and enabled: docs/hostsuites.md"
	@echo "make bench     the benchmark on a GPU                  (ARGS=...)"
	@echo "make wheel     a wheel in dist with kernels compiled for all architectures; minutes  (ARGS='--processes 4')"
	@echo "make clean     remove the virtual environments and caches of this folder"

demo:
	@if $(HAS_GPU); then $(MAKE) -s --no-print-directory $(GPU_VENV)/.ready && \
	    PYTHONPATH=. $(GPU_VENV)/bin/python examples/quickstart.py $(ARGS); \
	else $(MAKE) -s --no-print-directory $(READY) && $(VENV)/bin/python examples/quickstart.py $(ARGS); fi

# Reads docs/ and docstrings and imports nothing of gnnaccel, so torch is not needed.
docs: $(DOCS_VENV)/.ready
	PATH=$(CURDIR)/$(DOCS_VENV)/bin:$$PATH NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs --quiet build --strict --clean $(ARGS)
	@echo "build/site/index.html"

# The versions are those of the extra "docs" in setup.cfg.
$(DOCS_VENV)/.ready: setup.cfg
	@rm -rf $(DOCS_VENV)
	@$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip -qq --disable-pip-version-check install $$($(PYTHON) -c "import configparser; \
	    c = configparser.ConfigParser(); c.read('setup.cfg'); print(*c['options.extras_require']['docs'].split())")
	@touch $@

# The versions are those of the extra "lint" in setup.cfg; make test does not need them.
lint: $(VENV)/.lint
	$(VENV)/bin/ruff check --config .ci/ruff.toml
	$(VENV)/bin/mypy

$(VENV)/.lint: $(READY)
	$(PIP) install -c $(VENV)/constraints.txt -e '.[lint]'
	@touch $@

# A file's tests stay together, so that kernels are compiled for the emulation once. One thread each: the cores are taken.
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -m "not gpu" -n auto --maxprocesses 8 --dist loadfile

# Every test function, one case of each: tests/thinning.py.
test: $(READY)
	$(PYTEST) --few $(ARGS)

test-all: $(READY)
	$(PYTEST) $(ARGS)

# The oldest PyG in setup.cfg beside all else that make test uses. Its own to_hetero fails with this torch.
test-oldest: $(OLDEST)/.ready
	OMP_NUM_THREADS=1 PYTHONPATH=. $(OLDEST)/bin/python -m pytest -q -m "not gpu" --few -k "not heterogeneous_model" \
	    $(or $(ARGS),tests/pyg/test_session.py tests/pyg/test_plain_layers.py tests/pyg/test_options_gat.py \
	    tests/pyg/test_options_rgcn.py tests/pyg/test_propagate.py tests/profile/test_doctor.py \
	    "tests/pyg/test_means.py::test_two_kinds_of_nodes_and_odd_widths")

$(OLDEST)/.ready: $(READY)
	@rm -rf $(OLDEST)
	@$(VENV)/bin/python -m venv $(OLDEST)
	@$(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	    "$$($(OLDEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/outer.pth"
	$(OLDEST)/bin/python -m pip -qq --disable-pip-version-check install --no-deps torch-geometric==2.6.0
	@touch $@

# Environments in .venv-matrix, several GB; outcomes in tests/matrix.json and docs/compatibility.md. Needs no .venv.
matrix:
	$(PYTHON) -m tests.matrix $(ARGS)

# Kernels on a GPU where there is one, else on the CPU, plainly and emulated. docs/testing.md says how to read what it prints.
oracle:
	@if $(PYTHON) -c "import cupy, torch_geometric" 2>/dev/null && $(HAS_GPU); then $(PYTHON) -m tests.oracle $(ARGS); \
	else $(MAKE) -s --no-print-directory $(READY) && $(VENV)/bin/python -m tests.oracle $(ARGS); fi

# The usual GPU machine has torch, CuPy and pytest already. With pytest-xdist the tests share the GPU between processes.
gpu-test:
	@if $(PYTHON) -c "import cupy, pytest" 2>/dev/null && $(HAS_GPU); then \
	    $(PYTHON) tests/gpu_record.py --run $(ARGS); \
	else $(MAKE) -s --no-print-directory $(READY) && $(VENV)/bin/python tests/gpu_record.py --run $(ARGS); fi

# Small graphs only: the tools slow kernels down by one to two orders of magnitude.
sanitize:
	compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) -m pytest -q -m gpu tests/cuda $(ARGS)
	compute-sanitizer --tool racecheck --error-exitcode 1 $(PYTHON) -m pytest -q -m gpu tests/cuda $(ARGS)

HOST ?= pyg
hostsuites:
	@if $(PYTHON) -c "import cupy, pytest" 2>/dev/null && $(HAS_GPU); then \
	    $(PYTHON) -m tests.hostsuites.$(HOST)_suite $(ARGS); \
	else $(MAKE) -s --no-print-directory $(READY) && $(VENV)/bin/python -m tests.hostsuites.$(HOST)_suite $(ARGS); fi

bench:
	@if $(HAS_GPU); then PYTHONPATH=. $(PYTHON) -m gnnaccel bench $(ARGS); \
	else $(MAKE) -s --no-print-directory $(READY) && $(VENV)/bin/python -m gnnaccel bench $(ARGS); fi

# setuptools packs whatever an earlier build left in build/lib, old kernels too.
wheel: $(READY)
	$(VENV)/bin/python -m gnnaccel.cuda.runtime.make_ready $(ARGS)
	@rm -rf build/lib
	$(PIP) wheel --no-deps -w dist .

# A CUDA build of torch pins its own nvidia-* packages; only where it brings no NVRTC does ours count.
$(READY): setup.cfg constraints.txt
	@echo "setting up $(VENV) (once; takes a few minutes)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@grep -v '^nvidia-' constraints.txt > $(VENV)/constraints.txt
	$(PIP) install -c $(VENV)/constraints.txt $(TORCH)
	@$(PIP) show nvidia-cuda-nvrtc > /dev/null 2>&1 || cp constraints.txt $(VENV)/constraints.txt
	$(PIP) install -c $(VENV)/constraints.txt -e '.[test,pyg]'
	@touch $@

# Sees all packages of the python3 it was made from (also if that is a virtual environment itself), so pip installs
# only what is missing and asks no network if nothing is.
$(GPU_VENV)/.ready: setup.cfg
	@rm -rf $(GPU_VENV)
	@$(PYTHON) -m venv $(GPU_VENV)
	@$(PYTHON) -c "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\n')" > \
	    "$$($(GPU_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/outer.pth"
	@cuda=$$($(PYTHON) -c "import torch; print(torch.version.cuda.split('.')[0])"); \
	    cupy=$$($(PYTHON) -c "import cupy" 2>/dev/null || echo "cupy-cuda$${cuda}x>=13"); \
	    $(GPU_VENV)/bin/python -m pip -qq --disable-pip-version-check install \
	        'torch-geometric>=2.6,<2.9' numpy packaging platformdirs rich filelock $$cupy
	@touch $@

clean:
	rm -rf $(VENV) $(GPU_VENV) $(OLDEST) $(DOCS_VENV) .venv-matrix build dist gnnaccel/cuda/ready *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
