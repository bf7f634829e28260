# `make` says what there is. Each target installs what it needs first.
PYTHON ?= python3
# Another version of torch than that of constraints.txt, or `newest`, in an environment of its own: make test TORCH=2.15.0
TORCH ?=
VENV ?= .venv$(addprefix -torch-,$(TORCH))
# Which torch build to install: empty takes what the package index offers for this platform; the URL of
# PyTorch's own CPU or CUDA index takes that build (see CONTRIBUTING.md).
TORCH_INDEX_URL ?=
# What `make test` runs, and arguments of pytest.
TESTS ?= tests
# What `make validate` runs of the zoo: arguments of the harness, e.g. FX="--fx-tag day".
FX ?= --fx-tag day --fx-timing 3
# How long `make fuzz` runs, and with which programs.
FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 0
JOBS ?= auto

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export HF_HUB_OFFLINE = 1

.PHONY: help install validate validate-all test test-all test-long fuzz mutation lint docs docs-users links pictures picture clean

help: ## what there is
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1#/p' $(MAKEFILE_LIST) | while IFS='#' read -r target text; do printf '  make %-13s %s\n' "$$target" "$$text"; done
	@echo
	@echo '  TORCH=2.15.0 (or TORCH=newest) takes another torch, in an environment of its own.'
	@echo '  TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu takes the CPU build of torch.'

validate: $(INSTALLED) ## each pass on the models of every day, 6 minutes on two cores; writes reports/latest/report.html
	$(BIN)/pytest -n $(JOBS) validation $(FX)

validate-all: FX =
validate-all: validate ## each pass and each pair of passes on all models, some 20 minutes

# Each worker begins with whole files, so that few set up the same things, and takes over from others in the end. Each has
# one thread: threads of several workers on the same cores wait for each other, which takes longer than small models do.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal $(TESTS)

test: $(INSTALLED) ## the tests of every day, 6 minutes on two cores (tests/README.md)
	$(PYTEST) -m "not long"

test-long: $(INSTALLED) ## the tests that `make test` leaves out, but for those of the night
	$(PYTEST) -m "long and not nightly"

test-all: $(INSTALLED) ## all tests, each night and before a release
	$(PYTEST)

lint: $(INSTALLED) ## ruff, mypy, and the directions of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What Sphinx warns of is an error.
SPHINX := $(BIN)/sphinx-build --fail-on-warning --keep-going --fresh-env
docs: $(INSTALLED) ## the site, in docs/_build
	$(SPHINX) docs docs/_build

links: docs ## asks for each link of the site to other sites
	$(SPHINX) --builder linkcheck docs docs/_build/links

# In an environment that has these libraries, as from `.venv/bin/pip install --constraint constraints.txt --editable .[users]`.
docs-users: $(INSTALLED) ## the code of the pages on diffusers, sentence-transformers and adapters
	$(BIN)/python -c "import diffusers, peft, sentence_transformers"
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/test_docs.py -k "diffusers or sentence-transformers or adapters"

# A fault is made small and written to reports/fuzz.
fuzz: $(INSTALLED) ## random graphs against all passes, for FUZZ_SECONDS (600)
	FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m tests.fuzz

mutation: $(INSTALLED) ## plants faults in the code, one after the other: each must make a test fail
	$(BIN)/python -m tests.mutation $(MUTATION)

# The pictures of the README and of docs/capture.md, with Graphviz.
pictures: docs/images/merge_linears.svg docs/images/capture.svg docs/images/call.svg
docs/images/merge_linears.svg: docs/merge_linears.py $(INSTALLED)
	$(BIN)/python $< > $@.part && mv $@.part $@
docs/images/%.svg: docs/images/%.dot
	dot -Tsvg $< -o $@

# The picture of a report in the README, of the run in RUN; it needs chromium. Made of `fxopt validate --model bert-small --model resnet-small`.
RUN ?= reports/latest
picture:
	chromium --headless --no-sandbox --hide-scrollbars --virtual-time-budget=10000 --window-size=1280,1150 --screenshot=docs/images/report.png \
		"file://$(abspath $(RUN))/report.html#view=latency"

install: $(INSTALLED) ## installs everything into .venv, which the other targets do first

clean: ## removes the environments
	rm -rf $(VENV) .venv-torch-*

$(INSTALLED): pyproject.toml constraints.txt .ci/install.py
	@$(PYTHON) .ci/install.py $(VENV) --torch "$(TORCH)" --index-url "$(TORCH_INDEX_URL)"
