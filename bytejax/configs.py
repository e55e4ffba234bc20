"""Config files: YAML with `key=value` overrides, checked against frozen dataclasses.

Unknown keys, wrong types and missing files end in one `InputError` line that names the key.
"""

import dataclasses
import difflib
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import omegaconf
from omegaconf import OmegaConf

from bytejax.errors import InputError

Config = TypeVar("Config")


def read(path: Path | str, overrides: Sequence[str] = ()) -> Any:
    """The values of a YAML file after `key=value` overrides, e.g. "optimizer.learning_rate=1e-3"."""
    for item in overrides:
        if not re.match(r"[^=\s]+=", item):
            raise InputError(f"override {item!r} is not of the form key=value, e.g. steps=100")
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        raise InputError(f"{path}: no such config file{_neighbours(Path(path))}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{path}: not readable as a config file ({e.__class__.__name__})") from None
    try:
        values = OmegaConf.create(text) if text.strip() else OmegaConf.create()
    except Exception as e:  # the YAML parser's errors have no common base here
        raise InputError(f"{path}: not valid YAML ({' '.join(str(e).split())})") from None
    if not OmegaConf.is_dict(values):
        raise InputError(f"{path}: a config file is a mapping of keys to values")
    try:
        return OmegaConf.merge(values, OmegaConf.from_dotlist(list(overrides)))
    except Exception as e:
        raise InputError(f"{' '.join(overrides)} does not fit {path} ({' '.join(str(e).split())})") from None


def structured(kind: type[Config], values: Any, where: str) -> Config:
    """A `kind`, a dataclass, from nested mappings. `where` is named in errors."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(kind), values)
        missing = sorted(k for k in OmegaConf.missing_keys(merged))
        if missing:
            raise InputError(f"{where}: missing {', '.join(missing)}; give {missing[0]}=VALUE")
        return OmegaConf.to_object(merged)
    except omegaconf.errors.OmegaConfBaseException as e:
        raise InputError(f"{where}: {_explain(e, kind, values)}") from None


def _explain(error: Exception, kind: type, values: Any) -> str:
    """OmegaConf's error in one line that names the key and what would work."""
    key = getattr(error, "full_key", None) or ""
    first = str(error).split("\n")[0]
    if isinstance(error, (omegaconf.errors.ConfigKeyError, omegaconf.errors.ConfigAttributeError)):
        known = [f.name for f in dataclasses.fields(error.object_type)] if error.object_type else []
        *parents, last = key.split(".")
        near = difflib.get_close_matches(last, known, n=3)
        hint = (
            f"did you mean {' or '.join('.'.join([*parents, k]) for k in near)}?"
            if near
            else f"known: {', '.join(known)}"
        )
        return f"unknown key {key}; {hint}"
    if not key:  # a plain value where a section belongs: OmegaConf does not say where
        sections = sorted(f.name for f in dataclasses.fields(kind) if _is_section(f.type))
        plain = [k for k in sections if k in values and values[k] is not None and not OmegaConf.is_dict(values[k])]
        return f"{', '.join(plain) or 'a section'} must be a mapping of keys to values"
    return f"{key}: {first[0].lower() + first[1:]}"


def _is_section(kind: Any) -> bool:
    return any(dataclasses.is_dataclass(k) or typing.get_origin(k) is dict for k in (kind, *typing.get_args(kind)))


def _neighbours(path: Path) -> str:
    names = [p.name for p in sorted(path.parent.glob("*.yaml"))] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3) or names[:5]
    return f"; {path.parent} has {', '.join(near)}" if near else ""
