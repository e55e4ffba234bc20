"""Checkpoints of the Hugging Face hub, through huggingface_hub and its cache."""

import re
from pathlib import Path

from bytejax.checkpoints import PICKLES
from bytejax.errors import InputError

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = ["config.json", "generation_config.json", "tokenizer*.json", "*.jinja", "model*.safetensors", "*.index.json"]
DRAFTER_FILES = ["config.yaml", "model@900.pt"]  # of a released MtPC drafter


def is_id(source: str) -> bool:
    """Whether this is spelled like a hub id, organisation and name."""
    return ID.fullmatch(source) is not None and Path(source).suffix not in (".gguf", ".safetensors", *PICKLES)


def download(source: str, files: list[str] = FILES) -> Path:
    """The directory that holds the wanted files, of a checkpoint its config, tokenizer and safetensors.

    Raises InputError.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise InputError(
            f"{source!r} is no directory here, and to fetch it from the hub huggingface_hub is missing: "
            "pip install 'bytejax[hf]', or give a directory or a .gguf file"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=files))
    except errors.GatedRepoError:
        raise InputError(
            f"{source!r} is gated on the hub: accept its terms there and log in, or give a directory"
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(f"{source!r} is neither a directory here nor a public repository of the hub") from None
    except Exception as e:  # whatever the network, a proxy or the hub's own checks come to
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:160]
        raise InputError(
            f"{source!r} is no directory here, and the hub could not be reached ({reason}); "
            "download it where there is a network and give the directory"
        ) from None
