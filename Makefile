# Everything a developer runs. `make help` lists it; each target installs and builds what it needs.

.DEFAULT_GOAL := help
SHELL := /bin/bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Lets build trees of the same layout (build*/, build-mutants/tree-*/build) share compiled objects.
export CCACHE_BASEDIR := $(CURDIR)

# Looked up when a recipe runs: `make setup` may just have installed it.
CCACHE = $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
CONFIGURE = cmake -G Ninja --log-level=NOTICE $(CCACHE) -S .
# Options are remembered by the build folder: `make test` keeps what `make build CUDA=OFF` said.
remembered = $(or $(shell sed -n 's/^$(1):STRING=//p' build/CMakeCache.txt 2>/dev/null),$(2))
# The CUDA backend: AUTO (when there is an nvcc; `make setup` brings one), ON or OFF.
CUDA ?= $(call remembered,SONICMOE_CUDA,AUTO)
export CUDA
# What device code is compiled for: here Hopper alone, to save time. pip takes all that
# cmake/cuda.cmake lists.
ARCHITECTURES ?= $(call remembered,SONICMOE_CUDA_ARCHITECTURES,90a)
WITH_CUDA = -DSONICMOE_CUDA=$(CUDA) "-DSONICMOE_CUDA_ARCHITECTURES=$(ARCHITECTURES)" -DCMAKE_CUDA_COMPILER_LAUNCHER=$(CURDIR)/tools/compile_device.py
JOBS := $(shell nproc)
CXX_FILES = $(shell find benchmarks cli cmake examples fuzz include python src testkit tests \
              -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

SECONDS ?= 60
FRAMEWORKS = $(basename $(notdir $(wildcard tools/integrations/*.txt)))

.PHONY: help setup build device-build architectures receipt-check demo test test-integrations sanitize fuzz mutants bench format lint headers reference install-check wheel wheel-check snippets clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 28

setup:  ## install what is missing: Debian packages, Python packages into .venv
	@tools/setup.sh

build: setup  ## library, command-line tool, PyTorch extension and tests into build/
	$(CONFIGURE) -B build $(WITH_CUDA) -DSONICMOE_PYTHON=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python
	ninja -C build

device-build: build  ## what compiling the device files cost and gave; fails on spills and the like
	python tools/check_device_build.py build
	python tools/check_machine_code.py build

architectures: build  ## compile device files for the GPUs that the build leaves out; fails alike
	python tools/check_architectures.py build '$(FOLDER)' $(FOR)

receipt-check: build  ## does a receipt (tools/gpu_check.py) still vouch for this build?
	python tools/gpu_check.py verify build

demo: build  ## train a small MoE language model; options: make demo ARGS='--text PATH'
	python demo/train.py $(ARGS)

test: build  ## every test that needs no GPU
	ctest --test-dir build -LE gpu --output-on-failure --no-tests=error -j $(JOBS)
	OMP_NUM_THREADS=1 python -m pytest -q -n $(JOBS) --dist loadfile \
	  cli/tests python/tests demo/tests examples/tests tools/tests

test-integrations: build  ## the frameworks' adapters, each beside its framework, without a GPU
	tools/setup_integrations.sh
	@for name in $(FRAMEWORKS); do echo "=== $$name"; \
	  OMP_NUM_THREADS=1 .venv-$$name/bin/python -m pytest -q -n $(JOBS) --dist loadfile \
	    python/tests_integrations/$$name || exit 1; done

# All programs but those whose tests judge the judge and formulas.
SANITIZED = $(filter-out oracle_test activation_test gradient_test, \
  $(shell sed -n 's/^sonicmoe_test.\([a-z_]*\).*/\1/p' tests/CMakeLists.txt))
# Long tests whose code other tests or `make fuzz` run over the same kinds of buffers. The kernels of
# cpu_avx512 are those of cpu_avx512bf16, instantiated for fp32.
UNSANITIZED = -AggregateAtLength.*:Aggregate.SumsOfManyTokens:Layers.Bf16ErrorIsThatOf*:TokenRounding.TenThousandRandomCases*:*.RowsOfOneTokenAreAlike/*:*.SeveralGroupsOfTiles/*:*.EveryActivationAndLayout/cpu_avx512_*:*/Layer.OperationsAgree*:*/Layer.SameBits*_f32:*/Layer.PlainKernels*_f32
one_of = ^($(subst $() $(),|,$(1)))$$

sanitize: setup  ## C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(CONFIGURE) -B build-asan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSONICMOE_CUDA=OFF \
	  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO='-O1 -g1' -DSONICMOE_CLI=OFF \
	  -DSONICMOE_SANITIZE=address,undefined
	ninja -C build-asan $(SANITIZED)
	GTEST_FILTER='$(UNSANITIZED)' ctest --test-dir build-asan -R '$(call one_of,$(SANITIZED))' \
	  --output-on-failure --no-tests=error -j $(JOBS)

fuzz:  ## fuzz descriptors, routing lists and token rounding (Clang): make fuzz SECONDS=60
	@tools/setup.sh clang libclang-rt-dev libomp-dev
	$(CONFIGURE) -B build-fuzz -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DSONICMOE_CUDA=OFF -DSONICMOE_FUZZ=ON -DSONICMOE_TESTS=OFF -DSONICMOE_CLI=OFF
	ninja -C build-fuzz
	@tools/fuzz.sh $(SECONDS)

mutants: setup  ## break the sources one way at a time; each must turn a test red
	python tools/mutants.py

bench: build  ## our layer beside two PyTorch loops and the dense-GEMM bound
	python benchmarks/moe_cpu.py $(ARGS)

format: setup  ## clang-format every C++ file in place
	@clang-format -i $(CXX_FILES)

lint: setup headers reference  ## formatting, types, include directions, documents, commits, headers alone
	@clang-format --dry-run -Werror $(CXX_FILES) && echo "clang-format: $(words $(CXX_FILES)) files"
	ruff check
	ruff format --check
	mypy
	python tools/check_layers.py
	python tools/check_docs.py
	python tools/check_commits.py
	python tools/tile_times.py --check
	python tools/figures.py --check

headers:  ## compile every public header by itself
	tools/check_headers.sh

reference:  ## the C++ reference from the public headers into build/reference/html; no warnings
	@tools/setup.sh doxygen
	@mkdir -p build
	doxygen Doxyfile

install-check: setup  ## install as a static and as a shared library, build a consumer of each
	tools/check_install.sh

wheel: setup  ## dist/sonicmoe-*.whl; for the CPU alone: make wheel CUDA=OFF
	tools/make_wheel.sh

wheel-check: wheel  ## Python tests from the wheel, an editable installation, failures that explain
	tools/check_wheel.sh $(ARGS)

snippets: build  ## run the marked code blocks of README.md and docs/ against an installed copy
	cmake --install build --prefix build/prefix >/dev/null
	python tools/run_snippets.py build/prefix

clean:  ## remove the build folders (not .venv)
	rm -rf build build-* dist

.DEFAULT:
	@echo >&2 "make: there is no target '$@'. These are:"; $(MAKE) -s help >&2; exit 2
