"""A target's logits against those of the PyTorch model that transformers makes of the same checkpoint."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bytejax.errors import InputError
from bytejax.models.base import Target

TEXTS, LENGTH = 2, 48  # random ids that are compared
MOST_KL, LEAST_AGREEMENT = 1e-3, 0.95  # what rounding to bfloat16 does at most


def require() -> None:
    """Raises InputError where PyTorch or transformers is missing."""
    try:
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401
    except ImportError as e:
        raise InputError(f"comparing with PyTorch needs the package {e.name}: pip install 'bytejax[parity]'") from None


def model_of(path: Path) -> Any:
    """The PyTorch model of a released checkpoint, in float32; no code of the checkpoint's own is run.

    Raises InputError where it cannot be had.
    """
    require()
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    where, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    options |= {"local_files_only": True, "trust_remote_code": False}
    try:
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)
    except (ValueError, KeyError, OSError, ImportError) as e:
        raise InputError(f"transformers has no model for {path} ({str(e)[:160]})") from None
    return model.eval()


def compare(target: Target, model: Any) -> dict[str, float]:
    """Random ids through both. -> largest difference of two logits, KL(theirs, ours) in nats per position on average,
    share of positions with the same likeliest id.
    """
    import torch

    rng = np.random.default_rng(0)
    length = min(LENGTH, target.context)
    ids = rng.integers(0, target.vocab, (TEXTS, length))
    ours = np.asarray(target.logits(jnp.asarray(ids)), np.float64)
    with torch.inference_mode():
        theirs = model(torch.from_numpy(ids)).logits.double().numpy()
    if ours.shape != theirs.shape:
        raise InputError(f"the PyTorch model has logits of shape {theirs.shape}, ours {ours.shape}")
    p, q = _log_softmax(theirs), _log_softmax(ours)
    return {
        "max_difference": float(np.abs(ours - theirs).max()),
        "kl": float(np.maximum((np.exp(p) * (p - q)).sum(-1), 0).mean()),
        "top1_agreement": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
    }


def agrees(found: dict[str, float]) -> bool:
    """Whether the differences are ones of rounding."""
    return found["kl"] <= MOST_KL and found["top1_agreement"] >= LEAST_AGREEMENT


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
