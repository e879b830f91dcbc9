# The only front door: CI calls the same targets.

PYTHON ?= python3
WORKERS ?= 3
TESTS ?=
PYTEST_FLAGS ?=
CELLS ?=
LOCK_FLAGS ?=
BENCH ?=
ROUNDS ?= 3
SEEDS ?= 50000
START ?= 0
MINUTES ?= 10
SEED ?=

BIN := .venv/bin

# Where it is set, every process that a test starts would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup servers test test-all test-uvloop test-matrix lint format check lock wire wheel demo example example-route-plans bench bench-quick bench-peers bench-page signals prove-fuzz prove-contract prove-kills prove-ack-kill prove-pulsar-million prove-pulsar-outage prove-pulsar-tenants prove-recovery prove-http prove-cursor prove-cdc prove-effects prove-consumer-outage prove-rebuild prove-poison prove-bulkhead chaos simulate clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.installed ## make .venv from the hash-pinned lock (PYTHON=... to choose the interpreter)

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: '$(PYTHON)' is missing or older than Python 3.11; try: make setup PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	@touch $@

.venv/.locked: .venv/.created requirements/dev.txt
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.txt
	@touch $@

.venv/.installed: .venv/.locked pyproject.toml
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

servers: ## install the servers that the tests run against (root and apt-get, Maven; elsewhere: say what is missing)
	@PYTHON=$(PYTHON) scripts/servers

test: setup servers ## run the tests in a few minutes (TESTS=path to narrow, PYTEST_FLAGS=... for more, WORKERS=0 for one process)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS) $(TESTS)

test-all: setup servers ## all tests: every database, chaos, programs that want the machine for themselves, many simulated worlds
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --full $(PYTEST_FLAGS)
	$(BIN)/python -m pytest --alone $(PYTEST_FLAGS) tests/e2e
	$(MAKE) test-uvloop
	$(MAKE) simulate SEEDS=5000

# What waits, listens or speaks to a server by itself; the rest only awaits what these do.
ON_UVLOOP = tests/unit tests/conformance $(wildcard tests/integration/test_pulsar_*.py) $(patsubst %,tests/integration/test_%.py, \
  commit consumer doorbell drivers effects_proof inbox leases projection_consumer relay signals stream subscribe unit_of_work)

test-uvloop: setup servers ## units, relays, consumers, Pulsar and streams on uvloop, which uvicorn brings
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --loop uvloop $(PYTEST_FLAGS) $(ON_UVLOOP)

prove-contract: setup servers ## the contract program for Pulsar, on PostgreSQL and MariaDB
	$(BIN)/python -m pytest --alone tests/e2e/test_contract.py

test-matrix: setup servers ## the tests that touch a database, on all versions that we support (CELLS=pg14,sa20 for some)
	$(BIN)/python -m tests.matrix --workers $(WORKERS) --only "$(CELLS)"

lint: setup ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test ## all that CI asks for

lock: setup ## write requirements/dev.txt anew (LOCK_FLAGS=--upgrade to take newer versions)
	$(BIN)/uv pip compile pyproject.toml requirements/dev.in --all-extras --universal --generate-hashes \
	  --no-emit-index-url --python-version 3.11 --custom-compile-command "make lock" --quiet \
	  --output-file requirements/dev.txt $(LOCK_FLAGS)

# The oldest compiler whose code both supported majors of protobuf run; it has no place in the lock, which holds the newest.
wire: setup ## write the code for Pulsar's protocol anew from wire.proto
	$(BIN)/uv run --quiet --no-project --with grpcio-tools==1.76.0 python -m grpc_tools.protoc \
	  -I src --python_out=src --pyi_out=src pillarbox/transports/pulsar/wire.proto

wheel: setup ## build the sdist and the wheel into dist/
	$(BIN)/python -m build --no-isolation

demo: setup ## half a minute of load and faults on an embedded PostgreSQL, then the ledger
	$(BIN)/pillarbox demo

example: setup ## the order service of examples/orders on http://127.0.0.1:8000, on an embedded PostgreSQL
	$(BIN)/python -m examples.orders

example-route-plans: setup ## the route plans of examples/route_plans, with their read model
	$(BIN)/python -m examples.route_plans

bench: setup servers ## measure, in about 15 minutes (BENCH="--only drain,late" to narrow)
	$(BIN)/python -m bench $(BENCH)

bench-quick: setup servers ## the same with small sizes, in a minute
	$(BIN)/python -m bench --quick $(BENCH)

bench-peers: setup servers ## other libraries at the same work, in environments of their own (ROUNDS=3)
	$(BIN)/python -m bench.peers --rounds $(ROUNDS)

bench-page: setup ## put the results of the three into docs/reference/performance.md, and draw its picture
	$(BIN)/python -m bench.page

signals: setup ## write docs/reference/signals.md anew, from the list in telemetry.py
	$(BIN)/python scripts/signals

prove-fuzz: setup ## the long random proof
	$(BIN)/python -m tests.prove.fuzz --runs 5000

prove-kills: setup servers ## 20,000 events through relays that are killed 40 times, on PostgreSQL and MariaDB
	$(BIN)/python -m tests.prove.kills

prove-ack-kill: setup servers ## 200 relays that die between the acknowledgement of a Pulsar broker and their own note of it
	$(BIN)/python -m tests.prove.ack_kill

prove-pulsar-million: setup servers ## 1,000,000 events into a Pulsar cluster, through 30 kills of a relay and 3 of the broker
	$(BIN)/python -m tests.prove.pulsar_million

prove-pulsar-outage: setup servers ## a Pulsar broker that is cut off for 5 and 30 s: what that costs events and business writes
	$(BIN)/python -m tests.prove.pulsar_outage

prove-pulsar-tenants: setup servers ## 1,000 tenants on one relay, each with a Pulsar topic of its own
	$(BIN)/python -m tests.prove.pulsar_tenants

prove-recovery: setup servers ## how long lanes stand still after a kill and a stop, and what an outage costs
	$(BIN)/python -m tests.prove.recovery

prove-http: setup servers ## 200 requests that fail in every way, while their service is killed twice
	$(BIN)/python -m tests.prove.http

prove-cursor: setup servers ## the cursor of the log: all states of a model, then 200,000 events on PostgreSQL
	$(BIN)/python -m tests.prove.cursor_model
	$(BIN)/python -m tests.prove.cursor

prove-cdc: setup servers ## 100,000 events with bodies from a replication stream that is taken away every second
	$(BIN)/python -m tests.prove.cdc

prove-effects: setup servers ## 100,000 events, doubled and out of order, to consumers that are killed 40 times
	$(BIN)/python -m tests.prove.effects --seed 7

prove-consumer-outage: setup servers ## a PostgreSQL that is away for 60 s while messages come: no dead letters, and how long until it goes on
	$(BIN)/python -m tests.prove.consumer_outage --seed 7

prove-rebuild: setup servers ## a projection with 1,000,000 events is written anew while 500 more a second come in and readers ask
	$(BIN)/python -m tests.prove.rebuild

prove-poison: setup servers ## rejected keys and tenants, and transports with bugs, on three databases: nothing else waits for them
	$(BIN)/python -m tests.prove.poison

prove-bulkhead: setup servers ## four tenants go on while a fifth has every kind of trouble, from brokers and the outbox
	$(BIN)/python -m tests.prove.bulkhead

chaos: setup servers ## everything under fire: PostgreSQL, Pulsar, relays, links (MINUTES=10, SEED= to repeat a run)
	$(BIN)/pillarbox chaos --seconds $$(( $(MINUTES) * 60 )) $(if $(SEED),--seed $(SEED))

simulate: setup ## run relays and consumers through simulated faults, and search for planted ones (SEEDS=50000, START=0)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --start $(START) --processes $(WORKERS)
	$(BIN)/python -m tests.simulation.mutants
	$(BIN)/python -m tests.simulation.consumer_mutants

clean: ## remove everything that is made, .venv too
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
