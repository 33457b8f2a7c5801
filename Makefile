# Evenflow: every entry point of the project. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(shell find protos -name '*.proto')
PROTO_STAMP := .cache/protos.stamp
ENV_STAMP := $(VENV)/installed.stamp
BUF := @bufbuild/buf@1.75.0
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# The CPU engine: one OpenMP thread per worker, not bound to a core, or a step takes 400 ms instead of 6.
export OMP_NUM_THREADS ?= 1
export VLLM_CPU_OMP_THREADS_BIND ?= nobind
export VLLM_NO_USAGE_STATS ?= 1

.DEFAULT_GOAL := help
.PHONY: help lock setup proto lint types ui pictures test-ui models test test-unit test-integration test-clients test-client-programs test-executors test-e2e test-chaos test-nodes test-chart chart-golden test-exact test-layerwise test-engines test-drawn test-product test-fuzz fuzz test-faults test-timing test-avx2 nightly drift soak demo up down watch logs bench bench-planner bench-layerwise bench-parking bench-e2e bench-gateway papers-quick papers

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

LOCK := $(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --no-annotate --no-header --quiet \
  --overrides requirements/overrides.txt --extra-index-url $(TORCH_INDEX) --index-strategy unsafe-best-match
BUILT := services/gateway/http/built
SERVICES_LOCKED := gateway planner tracker executor-cpu

lock: ## resolve every lock file in requirements/ anew (needs PyTorch's package index)
	$(LOCK) --extra gateway --extra planner --extra simulator --extra tracker --extra executor-cpu --extra local --extra dev -o requirements/dev.txt
	$(foreach name,$(SERVICES_LOCKED),$(LOCK) --extra $(name) -c requirements/dev.txt -o requirements/$(name).txt &&) true
	$(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --no-annotate --no-header --quiet \
	  --extra executor-cuda -o requirements/executor-cuda.txt
	$(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --no-annotate --no-header --quiet \
	  --extra gateway --extra clients -o requirements/clients.txt

PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-deps

setup: $(ENV_STAMP) $(PROTO_STAMP) ## create .venv from the lock file and generate the stubs

$(ENV_STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) requirements/check_machine.py
	$(PYTHON) -m venv $(VENV)
	@echo "installing the locked packages into $(VENV) (a few minutes the first time)"
	$(PIP_INSTALL) --no-compile -r requirements/dev.txt \
	  || $(PIP_INSTALL) --no-compile --extra-index-url $(TORCH_INDEX) -r requirements/dev.txt \
	  || { echo "error: the packages could not be installed, pip says why above: is there a network, and room on the disk?"; exit 1; }
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # on all cores, which pip would do on one
	$(PIP_INSTALL) --no-build-isolation -e .
	touch $@

proto: $(PROTO_STAMP) ## generate the gRPC stubs beside the .proto files

$(PROTO_STAMP): $(PROTOS) $(ENV_STAMP)
	$(BIN)/python -m grpc_tools.protoc -Iprotos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --python_out=protos --grpc_python_out=protos \
	  --mypy_out=protos --mypy_grpc_out=protos $(PROTOS)
	mkdir -p $(@D) && touch $@

lint: setup ## ruff, import contracts, and buf where npx is installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	@if npx --yes $(BUF) --version >/dev/null 2>&1; then npx --yes $(BUF) lint; \
	else echo "buf lint skipped: npx cannot get $(BUF)"; fi

types: setup ## mypy --strict
	$(BIN)/mypy

ui: ## build the page of /ui into the gateway's package (needs npm)
	npm ci --prefix ui --no-audit --no-fund
	cd ui && npm run --silent check && npm run --silent build

test-ui: setup ## building the page gives what is committed, and axe finds no serious fault in it
	@if command -v npm >/dev/null && npm ci --prefix ui --no-audit --no-fund; then cd ui && npm run --silent check \
	&& node build.mjs ../.cache/ui && diff -r ../.cache/ui ../$(BUILT) && echo "the page is what its sources give" \
	&& cd .. && $(PYTEST) tests/integration/test_page_axe.py; \
	else echo "the page is not built again: npm cannot install its packages"; fi

models: setup ## make the models: the untrained one for exactness, and the demo's
	$(BIN)/python -m lab.models
	$(BIN)/python -m demo.model

# What every run of pytest leaves: its slowest tests on the screen, a junit file in .cache/tests.
PYTEST := GRPC_VERBOSITY=ERROR $(BIN)/python -m pytest --durations=30 --durations-min=1
JUNIT := --junitxml=.cache/tests

# `make test` makes these once, before the suites.
PURE_NEEDS := $(if $(PREPARED),,setup kernels)
STACK_NEEDS := $(if $(PREPARED),,setup models kernels executor-reference)
EXACT_NEEDS := $(if $(PREPARED),,setup models reference)

test-unit: $(PURE_NEEDS) ## no engine, no network
	$(PYTEST) $(JUNIT)/unit.xml --numprocesses=2 tests/unit

test-integration: $(PURE_NEEDS) ## contract and integration suites: real Redis, gRPC, processes
	$(PYTEST) $(JUNIT)/integration.xml --numprocesses=4 --dist=loadfile tests/contract tests/integration

# Packages that want another openai than vLLM does, and the gateway beside them. Their own warnings fail no test.
CLIENTS := .cache/clients
CLIENTS_STAMP := $(CLIENTS)/installed.stamp
$(CLIENTS_STAMP): requirements/clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/clients.txt
	touch $@

test-clients: $(if $(PREPARED),,setup) $(CLIENTS_STAMP) ## openai, litellm, langchain-openai, openai-agents, recorded sessions, and Java where it is, against the gateway
	GRPC_VERBOSITY=ERROR $(CLIENTS)/bin/python -m pytest -W default $(JUNIT)/clients.xml tests/clients --ignore=$(PROGRAMS)

# Its packages are pinned by package-lock.json.
PROGRAMS := tests/clients/test_programs.py
NODE := tests/clients/node
NODE_STAMP := $(NODE)/node_modules/.package-lock.json
$(NODE_STAMP): $(NODE)/package-lock.json
	@command -v npm >/dev/null && npm ci --prefix $(NODE) --no-audit --no-fund \
	  || echo "npm cannot install $(NODE): the tests of its programs are skipped"

test-client-programs: $(if $(PREPARED),,setup) $(NODE_STAMP) ## Claude Code, Codex and the AI SDK, as npm installs them, against the gateway
	$(PYTEST) $(JUNIT)/client-programs.xml $(PROGRAMS)

test-executors: $(STACK_NEEDS) ## executors in processes of their own
	$(PYTEST) $(JUNIT)/executors.xml tests/executors

test-chaos: $(STACK_NEEDS) ## whatever dies, hangs, ends and is cut off at random, under many requests
	$(PYTEST) $(JUNIT)/chaos.xml --numprocesses=2 --dist=loadfile tests/chaos

test-nodes: $(EXACT_NEEDS) ## engines over two network namespaces (root; 20 minutes): tokens are those of one process, nodes end with each other
	$(PYTEST) $(JUNIT)/nodes.xml -s tests/nodes

test-chart: $(if $(PREPARED),,setup chart-tools) ## the Helm chart: rendered, held against Kubernetes' schemas and the services' settings
	$(PYTEST) $(JUNIT)/chart.xml tests/chart

chart-golden: setup chart-tools ## write what the chart's tests compare with, when it is to render otherwise or services have other settings
	$(BIN)/python -m tests.charts

test-e2e: $(STACK_NEEDS) ## all processes, through the gateway
	$(PYTEST) $(JUNIT)/e2e.xml tests/e2e

# Several runs, so that what engines leave behind in a test's own process does not add up.
test-exact: test-layerwise test-engines test-drawn ## engines in the tests' own process: tokens are stock vLLM's, token for token

LAYERWISE := tests/exact/test_layerwise_exact.py
test-layerwise: $(EXACT_NEEDS) ## of these: layer-wise KV on the engines of every commit
	$(PYTEST) $(JUNIT)/layerwise.xml $(LAYERWISE)

test-engines: $(EXACT_NEEDS) ## of these: parts of the engine
	$(PYTEST) $(JUNIT)/engines.xml tests/exact --ignore=$(LAYERWISE)

test-drawn: $(EXACT_NEEDS) ## of these: what a commit draws from the product of options and failing copies
	$(PYTEST) $(JUNIT)/drawn.xml -v --draw tests/exact/product.py tests/exact/failures.py

.PHONY: reference executor-reference kernels chart-tools
reference: models
	$(BIN)/python -m tests.exact.reference float32

executor-reference: models
	$(BIN)/python -m tests.executor_stock

kernels: setup
	$(BIN)/python -m tests.kernels

chart-tools: setup
	$(BIN)/python -m lab.chart_tools

# Three suites at a time, the longest first: two leave a third of both cores idle, while engines start and readers wait.
test: setup ## everything that must pass (15 to 30 minutes on two cores)
	$(MAKE) --jobs=2 --output-sync=line lint types reference executor-reference kernels chart-tools
	$(MAKE) --jobs=3 --keep-going --output-sync=line PREPARED=yes test-engines test-layerwise test-executors test-e2e test-chaos \
	  test-integration test-unit test-drawn test-chart

.PHONY: product-parallel product-single product-failures
product-parallel:
	$(PYTEST) $(JUNIT)/product-parallel.xml -v tests/exact/product.py -k "pp1 or pp2"

product-single:
	$(PYTEST) $(JUNIT)/product-single.xml -v tests/exact/product.py -k "not pp1 and not pp2"

product-failures:
	$(PYTEST) $(JUNIT)/product-failures.xml -v tests/exact/failures.py

test-product: setup models ## layer-wise KV: the full product of its options, and of failing copies
	$(MAKE) --jobs=2 --output-sync=line product-parallel product-single product-failures

test-fuzz: setup ## random examples, ten times as many as `make test` tries
	EVENFLOW_FUZZ_TIMES=10 $(PYTEST) $(JUNIT)/fuzz.xml --numprocesses=2 -m hypothesis tests/unit tests/contract tests/integration

INPUTS ?= 20000
fuzz: setup ## anything at all at a gateway, beside paced streams (minutes; INPUTS=1000000: hours)
	$(BIN)/python -m bench.fuzz --inputs $(INPUTS) --out .cache/fuzz

test-faults: setup models ## every process and Redis killed, and hung for 30 s, under 22 streams (about 6 minutes)
	EVENFLOW_TEST_HANG_S=30 $(PYTEST) $(JUNIT)/faults.xml -m "" tests/e2e/test_faults.py

test-timing: setup models ## what a commit leaves out: clocks, with nothing else on the machine, and long runs
	$(PYTEST) $(JUNIT)/timing.xml -m nightly tests/unit tests/contract tests/integration tests/executors tests/e2e tests/chaos
	$(PYTEST) $(JUNIT)/timing-exact.xml -m nightly tests/exact

test-avx2: setup ## `make test` as on a processor without AVX-512
	answers=$$(echo $(VENV)/lib/python3*/site-packages)/sitecustomize.py; trap "rm -f $$answers" EXIT; \
	  cp tests/avx2_only.py $$answers && ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(MAKE) test

# WHEEL=file or VERSION=0.33.0: not the newest of the package index.
drift: setup models ## what an upgrade to the newest vLLM costs: its names, and the contracts on its Python (needs the package index)
	$(BIN)/python -m lab.vllm_drift $(if $(WHEEL),--wheel $(WHEEL)) $(if $(VERSION),--version $(VERSION))

soak: setup models ## layer-wise KV: 2,000 requests with random everything (10 minutes)
	$(BIN)/python -m tests.exact.soak

nightly: setup ## what `make test` draws from or leaves out, at length
	rm -rf .cache/reference
	$(MAKE) test-product
	$(MAKE) test-ui
	$(MAKE) test-clients
	$(MAKE) test-client-programs
	$(MAKE) test-fuzz
	$(MAKE) fuzz
	$(MAKE) soak
	$(MAKE) test-faults
	EVENFLOW_TEST_END_S=10 $(MAKE) test-nodes
	$(MAKE) test-timing
	-$(MAKE) drift # which tells of another vLLM, not of this tree

pictures: setup ## the README's pictures of the page, taken in Chromium
	EVENFLOW_TEST_PICTURES=docs/pictures $(PYTEST) tests/integration/test_page_pictures.py
	$(BIN)/python -m bench.concept_pictures

demo: setup ## everything from nothing: a real model, paced answers, four readers, vLLM beside them
	$(BIN)/python -m demo

up: setup ## start the local stack and leave it running, with the demo model (or SERVE="DIRECTORY --option ...")
	$(if $(SERVE),,$(BIN)/python -m demo.model)
	$(BIN)/evenflow serve $(or $(SERVE),.cache/models/smollm2-135m-instruct --dtype float32 --layerwise-kv --kv-host-memory 1G) --detach

# NAME=... where several stacks run.
down: ## stop the local stack
	@if [ -x $(BIN)/evenflow ]; then $(BIN)/evenflow down $(if $(NAME),--name $(NAME)); fi

watch: ## show what the engine of the local stack is doing
	$(BIN)/evenflow watch $(if $(NAME),--name $(NAME))

logs: ## follow the logs of the local stack
	$(BIN)/evenflow logs $(if $(NAME),--name $(NAME))

bench: bench-planner bench-layerwise bench-parking bench-gateway ## all benchmarks; each writes JSON and prints a table

bench-planner: setup ## how fast and how good the planner is (about 6 minutes; QUICK=--quick: the bars, 1 minute)
	$(BIN)/python -m bench.planner $(QUICK) --out .cache/bench/planner.json

bench-layerwise: setup models ## layer-wise KV: cost at zero offload, capacity, overlap (about 15 minutes)
	$(BIN)/python -m bench.layerwise --out .cache/bench

bench-parking: setup models ## park and resume by way and size, write-through, TokenFlow's ablation (5 minutes)
	$(BIN)/python -m bench.parking --out .cache/bench

bench-gateway: setup models ## streams of one gateway, the tracker, and both beside vLLM's server (5 minutes)
	$(BIN)/python -m bench.gateway --out .cache/bench

bench-e2e: setup models ## policies on an emulated device (hours; E2E="--quick": minutes, does not count)
	$(BIN)/python -m bench.e2e.prediction
	$(BIN)/python -m bench.e2e.halved_link
	$(BIN)/python -m bench.e2e $(E2E)

papers-quick: setup ## the papers' figures in the simulator, small (TRACES=folder adds OrbitFlow's recorded ones)
	$(BIN)/python -m bench.papers --quick $(if $(TRACES),--traces $(TRACES)) --out .cache/papers-quick

papers: setup ## the same at the size that counts (hours; finished runs are kept, TRACES=folder as above)
	$(BIN)/python -m bench.papers $(if $(TRACES),--traces $(TRACES)) --out .cache/papers
