"""Compiled programs are kept between runs: compilation is most of what the suite costs."""

from pathlib import Path

import jax

jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
