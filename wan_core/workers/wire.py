"""Arguments and results as JSON and tensors for the control channel, and back.

`pack` and `unpack` know no class. The types in the signature of a method say what `call` may build, and the types of
their fields what is built inside of that; nothing else is. Nothing is rounded, because JSON keeps all digits of a
float.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

TENSOR = "tensor:"  # before a tensor's name, where JSON has the place of a tensor


def pack(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """`value` as JSON has it: dataclasses as objects, named and other tuples as lists, paths and devices as text.
    Tensors are added to `tensors`, each under `name` and its path in `value`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return TENSOR + name
    if is_dataclass(value):
        return {one.name: pack(getattr(value, one.name), tensors, f"{name}.{one.name}") for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: pack(one, tensors, f"{name}.{key}") for key, one in value.items()}
    if isinstance(value, tuple):
        return [pack(one, tensors, f"{name}.{place}") for place, one in enumerate(value)]
    return str(value) if isinstance(value, (Path, torch.device)) else value


def unpack(kind: Any, data: Any, tensors: dict[str, Tensor] | None = None) -> Any:
    """A value of type `kind` from what JSON made of `pack`, or of `dataclasses.asdict`. Takes its tensors out of
    `tensors`. Options raise OptionError for what they do not allow."""
    if kind is Tensor and data is not None:
        assert tensors is not None
        return tensors.pop(data.removeprefix(TENSOR))
    if data is None or kind is Any:
        return data
    if kind in (Path, torch.device):
        return kind(data)
    arguments = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):  # X | None
        return unpack(next(one for one in arguments if one is not types.NoneType), data, tensors)
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return kind(**{name: unpack(_types(kind)[name], value, tensors) for name, value in data.items()})
    if isinstance(kind, type) and issubclass(kind, tuple) and not arguments:  # a named tuple
        return kind(*(unpack(one, value, tensors) for one, value in zip(_types(kind).values(), data, strict=True)))
    if get_origin(kind) is tuple:
        kinds = itertools.repeat(arguments[0]) if arguments[-1] is ... else arguments
        return tuple(unpack(one, value, tensors) for one, value in zip(kinds, data))  # noqa: B905
    if get_origin(kind) is dict:
        return {name: unpack(arguments[1], value, tensors) for name, value in data.items()}
    return data


def call(function: Callable[..., Any], packed: Mapping[str, Any], tensors: dict[str, Tensor]) -> Any:
    """What `function` returns for packed arguments, each of the type that its signature says."""
    kinds = get_type_hints(function)
    return function(**{name: unpack(kinds.get(name, Any), value, tensors) for name, value in packed.items()})


@functools.cache
def _types(kind: type) -> Mapping[str, Any]:
    """The type of each field of a dataclass or a named tuple."""
    return get_type_hints(kind)
