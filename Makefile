# `make demo` and `make test` set up everything that they need in .venv and run; see README.md.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e

# the tests start many processes: compile the package once, whatever the environment says
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-deploy test-all coverage lint format types bench docs package release clean

demo: $(VENV)/.demo
	$(BIN)/scaffpd demo $(DEMO)

# one process per core, each with its part of the files; who is done first takes from the others. One thread each
test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal

# real processes of FLARE with TLS; one after the other, they are many already
test-deploy: $(READY)
	$(BIN)/python -m pytest -m "deploy and not long" $(DEPLOY)

test-all: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not deploy"
	$(BIN)/python -m pytest -m deploy

# a number to look at, not a gate
coverage: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pytest-cov
	$(BIN)/python -m pytest -n auto --dist worksteal --cov=scaffpd --cov-report=term:skip-covered

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/speed/run.py
	$(BIN)/python benchmarks/rounds.py
	$(BIN)/python benchmarks/privacy/cost_of_privacy.py

# the site, into site/: open site/index.html, or for the search as well: python3 -m http.server -d site
docs: $(READY)
	$(BIN)/python docs/generate_cli.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# wheel and sdist, checked: their metadata, and the wheel by itself, in an environment that lends only its dependencies
package: $(READY)
	rm -rf dist
	$(PYTHON) -m venv dist/tools
	dist/tools/bin/python -m pip install --quiet --disable-pip-version-check build hatchling twine
	dist/tools/bin/python -m build --no-isolation --outdir dist .
	dist/tools/bin/python -m twine check --strict dist/scaffpd-*
	$(PYTHON) -m venv dist/fresh
	dist/fresh/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-index dist/scaffpd-*.whl
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$(dist/fresh/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/dependencies.pth"
	cd dist && fresh/bin/python -c "import scaffpd; assert '/fresh/' in scaffpd.__file__, scaffpd.__file__"
	cd dist && fresh/bin/scaffpd train hospitals --quiet && fresh/bin/scaffpd report runs/hospitals

# tag what the changelog describes and dates; GitHub's workflow `release` publishes the tag
release: lint types docs test package
	git diff --quiet HEAD
	$(BIN)/python docs/release_note.py
	git tag -a --cleanup=verbatim "v$$($(BIN)/python -c 'import scaffpd; print(scaffpd.__version__)')" -m "$$($(BIN)/python docs/release_note.py)"

# the demo installs what it needs, and compiles what it uses; everything else installs the rest
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) ".[report]" --no-compile
	touch $@

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis scaffpd-demo site
