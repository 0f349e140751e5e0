# `make demo` and `make test` work on a fresh clone: they make .venv and install under constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCHMARKS := m2_ultra_calibration model_validation dispatch_plans cells cross_table copies technique_rows host_units ndp_units moe_block core_switch parallel eplb_gap harness_overhead fleet_scale shared_context decode_roads loading quantisation time_stamps meter_truth power_coverage gauge_in_step idle_strays doubtful_sources trace_caches sampler tiny_training tiny_arms prediction_accuracy tuning_sessions lm_eval_speed history coreml_convert first_start idle_threads busy_neighbour decode_parts prefill_parts decode_batches long_prompts kept_cache last_layer engine_speed real_shapes

# A file's tests share what it builds, and stay together.
TWO_WORKERS := -n 2 --dist loadfile

# They wait for phones and gauges of a fixed pace, and compute next to nothing: two cores carry six of them.
SIX_WORKERS := -n 6 --dist load

# What a processor with AVX-512 computes without it: arithmetic that most machines have, by a smaller instruction set.
HELD_TO_AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 JOULEBENCH_KERNEL_FLAGS=-march=x86-64-v3

# One thread of arithmetic in tests: they are small, and threads that wait for each other crawl on a busy machine.
test quick numbers-avx2: export OMP_NUM_THREADS = 1

.PHONY: demo test check lint types floors quick numbers-avx2 bench format clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	rm -rf runs/demo # always a fresh run; name another --out for one to keep
	$(BIN)/joulebench run plans/demo.toml --out runs/demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "waits and not slow and not alone" $(SIX_WORKERS)
	$(BIN)/python -m pytest -m "not slow and not alone and not waits" $(TWO_WORKERS)
	$(BIN)/python -m pytest -m "alone and not slow"
	$(MAKE) numbers-avx2
	$(BIN)/python -m pytest -m "slow and not alone" $(TWO_WORKERS)
	$(BIN)/python -m pytest -m "slow and alone"

numbers-avx2: $(VENV)/.installed-dev
	if grep -qs avx512f /proc/cpuinfo; \
	then $(HELD_TO_AVX2) $(BIN)/python -m pytest -m "numbers and not slow" $(TWO_WORKERS); \
	else echo "no AVX-512 here: the tests above ran on what there is"; fi

check: lint types floors quick

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

floors: $(VENV)/.installed-dev
	$(BIN)/lint-imports

quick: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "waits and not slow and not alone" -q $(SIX_WORKERS)
	$(BIN)/python -m pytest -m "not slow and not alone and not waits" -q $(TWO_WORKERS)
	$(BIN)/python -m pytest -m "alone and not slow" -q

bench: $(VENV)/.installed-dev
	for name in $(BENCHMARKS); do $(BIN)/python -m tests.benchmarks.$$name || exit 1; done

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache
