# Targets of the native code; included by the Makefile. PY is the interpreter of the virtual environment.
PY ?= .venv/bin/python
CXX ?= g++
NVCC ?= $(shell command -v nvcc 2>/dev/null)
CLANGXX ?= $(firstword $(foreach c,clang++ $(addprefix clang++-,21 20 19 18 17 16 15 14),$(shell command -v $(c) 2>/dev/null)))
FUZZ_S ?= 20

NATIVE := build/native
RING_PARTS := $(addprefix csrc/ring/,ring_life.cpp ring_wait.cpp segment.cpp process.cpp)
RING_SOURCES := csrc/ring/ring.cpp $(RING_PARTS) csrc/ring/arena.cpp csrc/ring/partition.cpp
RING_HEADERS := $(wildcard csrc/ring/*.h csrc/tests/*.h)
TEST_FLAGS := -std=c++17 -O1 -g -Wall -Wextra -Werror -Icsrc/ring
ADDRESS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer

.PHONY: test-sanitize cuda-compile test-gpu

# Rings, arena and partition under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer; SIGKILL at every
# labelled point; corrupted segments, with libFuzzer where there is clang.
test-sanitize: $(NATIVE)/ring_threads.tsan $(NATIVE)/ring_threads.asan $(NATIVE)/ring_killed $(NATIVE)/fuzz_attach ## rings under sanitizers, SIGKILL and fuzzing
	$(NATIVE)/ring_threads.tsan 20000
	$(NATIVE)/ring_threads.asan 20000
	$(NATIVE)/ring_killed
	$(NATIVE)/fuzz_attach
ifneq ($(CLANGXX),)
	$(MAKE) $(NATIVE)/fuzz_attach.libfuzzer
	mkdir -p $(NATIVE)/corpus
	$(NATIVE)/fuzz_attach.libfuzzer -max_total_time=$(FUZZ_S) -max_len=1024 -print_final_stats=1 $(NATIVE)/corpus
else
	@echo "test-sanitize: no clang++, so libFuzzer was not run (apt-get install clang); the gcc driver above was"
endif

$(NATIVE)/ring_threads.tsan: csrc/tests/ring_threads.cpp $(RING_SOURCES) $(RING_HEADERS)
	@mkdir -p $(NATIVE)
	$(CXX) $(TEST_FLAGS) -fsanitize=thread csrc/tests/ring_threads.cpp $(RING_SOURCES) -o $@ -pthread

$(NATIVE)/ring_threads.asan: csrc/tests/ring_threads.cpp $(RING_SOURCES) $(RING_HEADERS)
	@mkdir -p $(NATIVE)
	$(CXX) $(TEST_FLAGS) $(ADDRESS) csrc/tests/ring_threads.cpp $(RING_SOURCES) -o $@ -pthread

# It includes ring.cpp itself, to put its kill points in.
$(NATIVE)/ring_killed: csrc/tests/ring_killed.cpp $(RING_SOURCES) $(RING_HEADERS)
	@mkdir -p $(NATIVE)
	$(CXX) $(TEST_FLAGS) $(ADDRESS) csrc/tests/ring_killed.cpp $(RING_PARTS) -o $@ -pthread

$(NATIVE)/fuzz_attach: csrc/tests/fuzz_attach.cpp $(RING_SOURCES) $(RING_HEADERS)
	@mkdir -p $(NATIVE)
	$(CXX) $(TEST_FLAGS) $(ADDRESS) -DSTALEFLOW_FUZZ_ROUNDS=20000 csrc/tests/fuzz_attach.cpp $(RING_SOURCES) -o $@ -pthread

$(NATIVE)/fuzz_attach.libfuzzer: csrc/tests/fuzz_attach.cpp $(RING_SOURCES) $(RING_HEADERS)
	@mkdir -p $(NATIVE)
	$(CLANGXX) $(TEST_FLAGS) $(ADDRESS) -fsanitize=fuzzer csrc/tests/fuzz_attach.cpp $(RING_SOURCES) -o $@ -pthread

# Every .cu with nvcc for the architectures we ship; needs no GPU, and a CPU torch's headers are enough.
CUDA_ARCHS ?= 80 90
CUDA_OBJECTS := $(patsubst csrc/ops/%.cu,$(NATIVE)/%.o,$(wildcard csrc/ops/*.cu))

cuda-compile: ## every .cu with nvcc for sm_80 and sm_90, no GPU needed
ifeq ($(NVCC),)
	@echo "cuda-compile: no nvcc in PATH (CUDA toolkit >= 12.6); nothing compiled" && exit 1
else
	$(MAKE) $(CUDA_OBJECTS)
	@echo "cuda-compile: $(words $(CUDA_OBJECTS)) files for sm_$(subst $() $(), sm_,$(strip $(CUDA_ARCHS)))"
endif

$(NATIVE)/%.o: csrc/ops/%.cu $(wildcard csrc/ops/*.h csrc/ops/*.cuh)
	@mkdir -p $(NATIVE)
	$(NVCC) -std=c++17 -O3 $(foreach a,$(CUDA_ARCHS),-gencode=arch=compute_$(a),code=sm_$(a)) -Xcompiler=-fPIC -DUSE_CUDA \
	  -DTORCH_TARGET_VERSION=0x020a000000000000 -Icsrc/ops -isystem $(TORCH_INCLUDE) -c $< -o $@

TORCH_INCLUDE = $(shell $(PY) -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0] + '/include')")

# One script for a machine with a GPU; what it cannot show there it reports as "not run".
test-gpu: ## tests on a machine with an NVIDIA GPU
	tests/gpu/run.sh
