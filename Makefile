# make train [ARGS="key=value ..."]   make test   make lint   make soak   make lock
# Every target makes .venv from the lock when it is missing or stale. To use a Python that already has
# torch (CUDA, NGC): make train PYTHON=python3
BASE_PYTHON ?= python3
ifdef PYTHON
READY :=
else
PYTHON := .venv/bin/python
READY := .venv/ready
endif

.PHONY: train test lint soak venv lock

train: $(READY)
	$(PYTHON) train.py $(ARGS)

test: $(READY)
	$(PYTHON) -m pytest -n auto -m "not soak" $(ARGS)

soak: $(READY)
	$(PYTHON) -m pytest -n auto -m soak $(ARGS)

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy .

venv: .venv/ready

# The stamp holds the lock it was made from, so that a checkout of another lock makes the environment anew.
.venv/ready: requirements.lock
	$(BASE_PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14) and "Python 3.10 to 3.13 is needed, this is " + sys.version.split()[0] + ": make BASE_PYTHON=python3.12 ...")'
	$(BASE_PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --quiet --requirement requirements.lock
	cp requirements.lock $@

# Needs uv. CUDA libraries are left to torch's own wheel, which pins them, so that one lock serves CPU and CUDA.
lock:
	uv pip compile --universal --python-version 3.10 --extra dev --no-header --no-annotate \
		--no-emit-package setuptools -o requirements.lock pyproject.toml
	sed -i -E '/^(nvidia-|cuda-|triton)/d' requirements.lock
