# Every target sets itself up on a bare machine that has Python 3.11 or newer and make.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
# numeric libraries otherwise start one thread a core in every test process
ONE_THREAD = OMP_NUM_THREADS=1

.PHONY: help demo test lint types clean

help:
	@echo "make demo    export, build, run and check the demo checkpoint: pictures from a prompt by compiled engines"
	@echo "make test    the test suite"
	@echo "make lint    ruff;  make types    mypy --strict"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt hatchling editables setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[compile,cpu,rtx,dev]'
	@touch $@

demo: $(READY)
	$(BIN)/trtdiff export checkpoints/digits
	$(BIN)/trtdiff build exports/digits
	$(BIN)/trtdiff run engines/digits "a handwritten seven, red ink on a yellow page" \
	    "a handwritten three, blue ink on a white page" "the digit 5 in white on navy paper" \
	    "green 8, pink background" --count 8 --guidance 3 --seed 7 --grid -o engines/demo.png
	$(BIN)/trtdiff check engines/digits --against checkpoints/digits
	@echo "pictures: engines/demo.png"

test: $(READY)
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) exports engines/*/ dist
