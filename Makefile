# Every target sets up what it needs in this folder: no root, nothing by hand. Needs python3 (3.11+), its venv
# module, and make. PYTHON=... chooses another interpreter.
PYTHON ?= python3
VENV := .venv
PROTO_VENV := .venv-proto
BENCH_VENV := .venv-bench
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo shows test test-fast reliability lint proto bench clean

help:
	@echo "make demo       train a small GPT on 4 ranks, kill one in mid-save, resume on other topologies (4 minutes)"
	@echo "make shows      lose ranks, nodes and copies; print what is restored, and from where"
	@echo "make test       everything that is tested, real S3 server included"
	@echo "make test-fast  unit and property tests only"
	@echo "make reliability  put every fault in; writes the table of docs/reliability.md"
	@echo "make lint       style, types, layer contract"
	@echo "make proto      generate the protobuf code again"
	@echo "make bench      measure, next to the limits of this machine and other libraries"

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[torch,test,demo,dev]'
	touch $@

# The generator pins protobuf below 6; it must not share an environment with the run time.
$(PROTO_VENV)/.ready: requirements-proto.txt
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install -qq --disable-pip-version-check -r requirements-proto.txt
	touch $@

# The libraries that are measured beside ours have an environment of their own. The wheel of NVRx is for another Python;
# the part that is measured is pure Python and is kept apart, without its dependencies. Where it cannot be had, its row
# says "not installed".
$(BENCH_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[torch,test,demo,bench]'
	$(BENCH_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --only-binary=:all: \
	  --python-version 3.12 --platform manylinux_2_39_x86_64 --target $(BENCH_VENV)/nvrx nvidia-resiliency-ext==0.7.0 || true
	touch $@

demo: $(VENV)/.ready
	$(RUN) examples/demo.py

shows: $(VENV)/.ready
	$(RUN) -m tests.shows
	$(RUN) examples/elastic.py

test: $(VENV)/.ready $(PROTO_VENV)/.ready
	$(RUN) -m tests.support.ceph --install || true  # the summary of the tests says so where it cannot be had
	$(RUN) -m pytest -n 3 --dist loadfile  # most of the time goes into waiting for processes and disks

test-fast: $(VENV)/.ready $(PROTO_VENV)/.ready
	$(RUN) -m pytest -n 2 --dist loadfile tests/unit tests/property

# -m fault: those that are rows of the table.
reliability: $(VENV)/.ready
	$(RUN) -m pytest -n 2 --dist loadfile -m fault --reliability-report docs/reliability.md

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

proto: $(PROTO_VENV)/.ready
	$(PROTO_VENV)/bin/python proto/generate.py

bench: $(BENCH_VENV)/.ready
	$(BENCH_VENV)/bin/python -m benchmarks

clean:
	rm -rf $(VENV) $(PROTO_VENV) $(BENCH_VENV) .cache build *.egg-info demo-out elastic-out
