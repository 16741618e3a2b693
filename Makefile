# Every target sets up what it needs; see `make help`.

# HOST ignores the environment: some shells export the machine's name as HOST, which would open the
# port to the network.
HOST = 127.0.0.1
PORT ?= 8000
WORKERS ?= 2
MEMORY ?= 1GiB
DTYPE ?= bfloat16
MODEL ?=
ARGS ?=
TORCH_INDEX ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 3
TESTS ?=
CLIENTS ?=

export TORCH_INDEX PYTEST_ARGS PYTEST_WORKERS TESTS
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

empty =
space = $(empty) $(empty)
PYTHON = .venv/bin/python
SETUP = @exec sh scripts/setup.sh

.DEFAULT_GOAL := help
.PHONY: help serve demo test test-slow check check-deploy containers-test boards-check gen wheels clean trace-store-test client-tours

help:
	@echo 'make serve    serve a model behind an OpenAI-compatible API on this machine'
	@echo '                MODEL=       hub id or folder; empty: SmolLM2-135M-Instruct, included'
	@echo '                WORKERS=2    worker processes'
	@echo '                MEMORY=1GiB  memory of each worker, for weights and KV cache together'
	@echo '                DTYPE=bfloat16  PORT=8000  HOST=127.0.0.1'
	@echo '                ARGS=        more arguments for `tideserve up`'
	@echo 'make demo     show how dropped layers become KV cache in a burst of requests'
	@echo 'make test     run the tests, about ten minutes; make test-slow: the tests that take longer'
	@echo '                TESTS=       only these folders, files or tests'
	@echo '                PYTEST_ARGS= more arguments for pytest   PYTEST_WORKERS=3'
	@echo 'make trace-store-test  downloads a trace store, sends it traces of a cluster and reads them back'
	@echo 'make client-tours  tests with clients and servers of other projects, each in its own environment;'
	@echo '                downloads about 6 GiB in all. CLIENTS= only these: see docs/clients.md'
	@echo 'make check    formatting, lint, types, import rules, contracts, generated files'
	@echo 'make boards-check  queries of the Grafana boards on a loaded cluster and a real Prometheus'
	@echo 'make check-deploy  manifests and chart in deploy/; downloads the tools into the cache folder'
	@echo 'make containers-test  build the images, run a cluster, inject faults; needs Docker, or'
	@echo '                PRIVATE_ENGINE=1 as root on Debian: see docs/containers.md'
	@echo 'make gen      generate stubs, tables in docs/, alerts in deploy/ and requirements/images/'
	@echo 'make wheels   build the packages tideserve-api, tideserve-client and tideserve into dist/'
	@echo 'make clean    delete .venv and caches of tools; CACHE=1: also models and batches'
	@echo
	@echo 'The first run installs about 1.7 GiB into .venv (Python 3.11 or newer is needed).'
	@echo 'TORCH_INDEX= is a package index for torch, such as an index of CPU builds for machines'
	@echo 'without a GPU; a new value reinstalls torch. TIDESERVE_CACHE= moves the cache folder.'

serve:
	$(SETUP) serve $(if $(MODEL),--no-model)
	@exec .venv/bin/tideserve up --workers "$(WORKERS)" --port "$(PORT)" --memory "$(MEMORY)" \
		--host "$(HOST)" --dtype "$(DTYPE)" $(if $(MODEL),--model "$(MODEL)") --with-parent $(ARGS)

demo:
	$(SETUP) serve
	@exec .venv/bin/tideserve demo

test:
	$(SETUP) test
	@exec $(PYTHON) scripts/run_tests.py

test-slow:
	$(SETUP) test
	@exec $(PYTHON) scripts/run_tests.py --slow

trace-store-test:
	$(SETUP) test --no-model
	@FETCH_TRACE_STORE=1 TESTS=tests/integration/test_trace_store.py exec $(PYTHON) scripts/run_tests.py --no-skips

client-tours:
	$(SETUP) test
	@exec $(PYTHON) -m pytest -s tests/clients/test_clients.py tests/clients/test_upstreams.py -k "$(subst $(space), or ,$(strip $(CLIENTS)))"

check:
	$(SETUP) test --no-model
	@exec $(PYTHON) scripts/run_checks.py

check-deploy:
	$(SETUP) test --no-model
	@exec $(PYTHON) scripts/check_deploy.py --fetch

boards-check:
	$(SETUP) test
	@TESTS=tests/integration/test_boards.py exec $(PYTHON) scripts/run_tests.py --no-skips

containers-test:
	$(SETUP) test
	@exec $(PYTHON) scripts/containers_test.py

gen:
	$(SETUP) test --no-model
	@$(PYTHON) scripts/gen_stubs.py
	@$(PYTHON) scripts/gen_docs.py
	@$(PYTHON) scripts/image_requirements.py

wheels:
	$(SETUP) serve --no-model
	@exec $(PYTHON) scripts/build_wheels.py

clean:
	$(SETUP) clean $(if $(CACHE),--cache)
