"""Compiled programs are kept on disk between runs, and made with little optimisation: compilation is most of what the
suite costs.

In a process they are dropped now and then. Every one of them maps memory of its own, and a process that has made some
hundreds meets Linux's limit on maps and dies in the compiler.
"""

import os
from pathlib import Path

if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):  # before JAX reads them
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax  # noqa: E402

from bytejax.decoding import generate  # noqa: E402

KEPT_FOR = 25  # tests

jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

_run = 0


def pytest_runtest_teardown():
    global _run
    _run += 1
    if _run % KEPT_FOR == 0:
        for program in (generate.START, generate.RUN):
            program.clear()
        jax.clear_caches()
