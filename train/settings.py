"""TrainConfig from YAML and overrides, back to plain values, as a table of its keys, and compared with another."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from .config import FREE_ON_RESUME, TrainConfig


class ConfigError(ValueError):
    """A configuration that cannot be: the message lists every fault, with the nearest known key for unknown ones."""


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting: its dotted name, type, default (None with ``required``) and description."""

    name: str
    type: str
    default: Any
    required: bool
    description: str


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in a YAML file, with ``overrides`` such as ``optim.lr=3e-4`` (values are YAML) on top.

    Raises ConfigError listing all unknown keys and wrong values at once.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys such as target: and data:, got {type(content).__name__}")
    return parse_config(content, overrides, source=str(path))


def parse_config(
    content: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "configuration"
) -> TrainConfig:
    """The configuration in nested plain values. Raises ConfigError listing every fault."""
    merged, faults = _with_overrides(content, overrides)
    try:
        config = TypeAdapter(TrainConfig).validate_python(merged)
    except ValidationError as error:
        faults += [_fault(detail) for detail in error.errors()]
        config = None
    if faults or config is None:
        raise ConfigError(
            f"{source}: {len(faults)} {'fault' if len(faults) == 1 else 'faults'}\n  " + "\n  ".join(faults)
        )
    return config


def config_keys() -> Iterator[Key]:
    """Every setting in order, for ``--help`` and the docs."""
    return _keys(TrainConfig, "")


def flat_config(config: TrainConfig) -> dict[str, Any]:
    """Dotted names to plain values."""
    values: dict[str, Any] = {}
    for key in config_keys():
        value: Any = config
        for part in key.name.split("."):
            value = getattr(value, part)
        values[key.name] = list(value) if isinstance(value, tuple) else value
    return values


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``key: old -> new`` for settings (flat) that alter training and differ: such a run cannot be resumed.

    A key that was not known yet when the run began stood at what is now its default.
    """
    defaults = {key.name: key.default for key in config_keys() if not key.required}
    pairs = {name: (old.get(name, defaults.get(name, "absent")), new.get(name, "absent")) for name in {*old, *new}}
    return [
        f"{name}: {before!r} -> {now!r}"
        for name, (before, now) in sorted(pairs.items())
        if _plain(before) != _plain(now)
        and not any(name == free or name.startswith(f"{free}.") for free in FREE_ON_RESUME)
    ]


def _plain(value: Any) -> Any:
    """As JSON has it: a tuple and a list are the same setting."""
    return list(value) if isinstance(value, tuple) else value


def _with_overrides(content: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    merged = _deep_copy(content)
    faults = []
    for override in overrides:
        name, sign, text = override.partition("=")
        parts = name.strip().split(".")
        if not sign or not all(parts):
            faults.append(f"override {override!r}: expected key=value, for example optim.lr=3e-4")
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            faults.append(f"override {override!r}: the value is not YAML")
            continue
        place = merged
        for part in parts[:-1]:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[parts[-1]] = value
    return merged, faults


def _deep_copy(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _deep_copy(value) if isinstance(value, Mapping) else value for key, value in content.items()}


def _fault(detail: ErrorDetails) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        nearest = _nearest(name)
        return f"unknown key {name}" + (f"; did you mean {nearest}?" if nearest else "")
    if detail["type"] in ("missing", "missing_argument"):
        return f"{name} is missing: it has no default"
    if detail["type"] in ("dataclass_type", "dataclass_exact_type"):
        return f"{name} must hold keys, got {detail['input']!r}"
    return f"{name}: {detail['msg']}, got {detail['input']!r}" if name else detail["msg"]


def _nearest(name: str) -> str | None:
    """The known key most like ``name``: in the same section first, then by the last part anywhere, then as a whole."""
    known = [key.name for key in config_keys()]
    section, _, last = name.rpartition(".")
    here = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    if not section:
        here.update({key.partition(".")[0]: key.partition(".")[0] for key in known})
    anywhere = {key.rpartition(".")[2]: key for key in reversed(known)}
    for names in (here, anywhere, {key: key for key in known}):
        close = difflib.get_close_matches(name if names.keys() == set(known) else last, list(names), n=1, cutoff=0.6)
        if close:
            return names[close[0]]
    return None


def _keys(kind: type, prefix: str) -> Iterator[Key]:
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        info = field.default
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _keys(hints[field.name], f"{prefix}{field.name}.")
        elif isinstance(info, FieldInfo):
            required = info.default is PydanticUndefined
            yield Key(
                f"{prefix}{field.name}",
                _type_text(hints[field.name]),
                None if required else info.default,
                required,
                info.description or "",
            )


def _type_text(hint: Any) -> str:
    """``int``, ``str | None``, ``sdpa | eager``: a type as a reader of --help wants it."""
    arguments = getattr(hint, "__args__", None)
    if arguments is None:
        return "null" if hint is type(None) else hint.__name__
    origin = getattr(hint, "__origin__", None)
    if isinstance(origin, type):
        return f"{origin.__name__} of {', '.join(_type_text(a) for a in arguments if a is not ...)}"
    return " | ".join(a if isinstance(a, str) else _type_text(a) for a in arguments)
