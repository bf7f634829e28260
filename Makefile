# `make validate` and `make test` set everything up and do their job; nothing needs to be installed first.
PYTHON ?= python3
VENV ?= .venv
# Which torch build to install: empty takes what the package index offers for this platform; the URL of
# PyTorch's own CPU or CUDA index takes that build (see the README).
TORCH_INDEX_URL ?=
# How long `make fuzz` runs, and with which programs.
FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 0
# Extra arguments for the harness, e.g. FX="--fx-tag smoke".
FX ?=
JOBS ?= auto

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
export HF_HUB_OFFLINE = 1

.PHONY: validate test fuzz mutation lint docs links pictures clean

validate: $(INSTALLED)
	$(BIN)/pytest -n $(JOBS) validation $(FX)

# Each worker begins with whole files, so that few set up the same things, and takes over from others in the end. Each has
# one thread: threads of several workers on the same cores wait for each other, which takes longer than small models do.
test: export OMP_NUM_THREADS = 1
test: $(INSTALLED)
	$(BIN)/pytest -n $(JOBS) --dist worksteal tests

# Random graphs against all passes; a fault is made small and written to reports/fuzz.
fuzz: $(INSTALLED)
	FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m tests.fuzz

# Plants faults in the code, one after the other: each must make a test fail; and so must each guard that is disabled.
mutation: $(INSTALLED)
	$(BIN)/python -m tests.mutation
	$(BIN)/python -m tests.mutation --guards

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in docs/_build; what Sphinx warns of is an error. `make links` asks for each link to other sites.
SPHINX := $(BIN)/sphinx-build --fail-on-warning --keep-going --fresh-env
docs: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(SPHINX) docs docs/_build

links: docs
	$(SPHINX) --builder linkcheck docs docs/_build/links

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

clean:
	rm -rf $(VENV)

# torch goes first and by exact version: a range would take the newest build and its CUDA libraries.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
