"""bytejax: byte-level language models that write several bytes per forward pass, without changing what they say."""

from bytejax import circuits
from bytejax.decoding.generate import Result, generate, stream
from bytejax.errors import InputError
from bytejax.loading import load_drafter, load_target, save_head, save_target

__version__ = "0.1.0"
__all__ = [
    "InputError",
    "Result",
    "circuits",
    "generate",
    "load_drafter",
    "load_target",
    "save_head",
    "save_target",
    "stream",
]
