"""The schema of a node, with what only newer versions of ComfyUI take; widgets from the table of options; and the
numbers that no node takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, get_origin, is_typeddict

from comfy_api.latest import io  # pyright: ignore[reportMissingImports]
from torch import Tensor

from wan_core.config import OptionError, check_choice
from wan_core.config.table import Option, table

# For inputs that few change: the page shows them when asked to.
ADVANCED: dict[str, Any] = {"advanced": True} if "advanced" in inspect.signature(io.Int.Input).parameters else {}

NODES = {  # part of the page's menu -> its nodes, which begin with WanCore
    "load": "ModelLoader TextEncoderLoader VAELoader VisionLoader FromModel LoRA",
    "prompt": "TextEncode PromptsOverTime ImageToVideo NAG",
    "sample": "EmptyLatent Sampler VAEDecode DecodeToVideo",
    "speed": "Accelerate AccelerateVAE Skipping Launcher",
    "control": "VACE Camera Animate Animate2 SoundToVideo",
    "tools": "PlanPreview Report ReportCard Compare",
}
CATEGORIES = {f"WanCore{name}": f"WanCore/{part}" for part, names in NODES.items() for name in names.split()}

ROUND = 0.0001  # to which a widget's number is rounded: finer than any step
INPUTS: dict[type, Any] = {int: io.Int, float: io.Float, bool: io.Boolean, str: io.Combo}  # by a widget's default


def schema(node_id: str, display_name: str, *, aliases: str, shows_text: bool = False, **more: Any) -> io.Schema:
    """A node's schema. aliases: words by which the page's search finds it, with commas. shows_text: a node that is no
    output and shows text, which is shown again when its result comes from the cache."""
    fields = getattr(io.Schema, "__dataclass_fields__", {})
    newer = {"search_aliases": aliases.split(", "), "has_intermediate_output": shows_text}
    more |= {name: value for name, value in newer.items() if name in fields}
    return io.Schema(node_id=node_id, display_name=display_name, category=CATEGORIES[node_id], **more)


def socket_type(name: str, of_class: type) -> Any:
    """A type of socket for objects of a class."""
    made = io.Custom(name)
    made.Type = of_class
    return made


def output(kind: Any, name: str, tooltip: str) -> Any:
    """An output of a socket type. Its id ends with `_out` where an input has the name that is shown."""
    return kind.Output(name, display_name=name.removesuffix("_out"), tooltip=tooltip)


def widgets(kind: Any, *names: str, **changed: Any) -> list[Any]:
    """The widgets of a dataclass of options: those of `names`, or all that have a tooltip. A prompt may leave each out,
    which is its default: widgets that it must have stand before them. changed: other arguments of
    ComfyUI's inputs, by name of the option; `id` is another name."""
    options = table(kind)
    return [_widget(name, options[name], changed.get(name, {})) for name in names or options if options[name].tip]


def _widget(name: str, one: Option, changed: Mapping[str, Any]) -> Any:
    default = one.default if one.shown is None else one.shown
    settings: dict[str, Any] = {"default": default, "optional": True, "tooltip": one.tip}
    settings |= ADVANCED if one.advanced else {}
    if isinstance(default, str) and one.reader is not None:
        return io.String.Input(name, **settings)
    if isinstance(default, str):
        settings["options"] = list(one.choices)
    elif not isinstance(default, bool):
        limits = {"min": one.low if one.least is None else one.least, "max": one.high if one.most is None else one.most}
        settings |= {key: type(default)(limit) for key, limit in limits.items() if limit is not None}
        settings |= {} if one.step is None else {"step": one.step}
        settings |= {"round": ROUND} if isinstance(default, float) else {}
    settings |= changed
    return INPUTS[type(default)].Input(settings.pop("id", name), **settings)


def value_of(one: Option, value: Any) -> Any:
    """What a widget's value is for the option: the default that is shown stands for the option's own, text is read as
    on the command line, several with commas. Raises OptionError."""
    if one.reader is None:
        return one.default if value in (None, one.shown) else value
    texts = (value or "").split(",") if one.several else [value or ""]
    values = tuple(one.reader(text.strip()) for text in texts if text.strip())
    return (values if one.several else values[0]) if values else one.default


def checked(node: type[io.ComfyNode]) -> type[io.ComfyNode]:
    """`node`, which refuses values that its widgets and sockets do not take: before a prompt runs those that ComfyUI
    hands to `validate_inputs`, which names all sockets, and before the node runs all of them. ComfyUI compares neither
    what comes through a link with a widget's type and limits, nor what `validate_inputs` names, and hands on any
    constant for a socket."""
    inputs = {one.id: one for one in node.define_schema().inputs}
    checks = vars(node)["validate_inputs"].__func__ if "validate_inputs" in vars(node) else _nothing_to_check
    own = set(inspect.signature(checks).parameters)

    def check_all(values: Mapping[str, Any], runs: bool) -> None:
        check_values(inputs, values, runs)
        for name in values.keys() - own if runs else ():
            if isinstance(inputs.get(name), io.Combo.Input):
                check_choice(name, values[name], tuple(inputs[name].options))

    def wrapped(function: Any, runs: bool, *sockets: inspect.Parameter) -> Any:
        @functools.wraps(function)
        def check(cls: type[io.ComfyNode], *args: Any, **values: Any) -> Any:
            check_all(values, runs)
            return function(cls, *args, **{name: value for name, value in values.items() if runs or name in own})

        @functools.wraps(function)
        async def check_async(cls: type[io.ComfyNode], *args: Any, **values: Any) -> Any:  # ComfyUI asks which it is
            check_all(values, runs)
            return await function(cls, *args, **values)

        wrapper: Any = check_async if inspect.iscoroutinefunction(function) else check
        signature = inspect.signature(function)  # by which ComfyUI knows the inputs to hand in
        wrapper.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *sockets])
        return classmethod(wrapper)

    sockets = [name for name, one in inputs.items() if not isinstance(one, tuple(KINDS)) and name not in own]
    node.execute = wrapped(vars(node)["execute"].__func__, True)
    node.validate_inputs = wrapped(
        checks,
        False,
        *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in sockets),
    )
    return node


def _nothing_to_check(cls: type[io.ComfyNode]) -> bool:
    return True


def check_values(inputs: Mapping[str, Any], values: Mapping[str, Any], runs: bool) -> None:
    """Raise OptionError for a value that a widget or a socket does not take. inputs: of a node, by name. runs: nothing
    is None that a link will bring."""
    for name, value in values.items():
        own = inputs.get(name)
        kind = next((kind for kind in KINDS if isinstance(own, kind)), None)
        if own is None or (value is None and not runs):
            continue
        if kind is None:
            check_socket(own, value, runs)
            continue
        types, takes = KINDS[kind]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            given = "nothing" if value is None else f"{value!r:.60}"
            raise OptionError(
                f"{name} takes {takes}, and {given} was given: enter one, or connect a node that gives it"
            )
        if kind in (io.Int.Input, io.Float.Input):
            check_number(name, value, getattr(own, "min", None), getattr(own, "max", None))
        if kind is io.Int.Input and value != int(value):
            raise OptionError(f"{name} takes {takes}, and {value!r:.60} was given: round it")


def check_socket(socket: Any, value: Any, runs: bool) -> None:
    """Raise OptionError for what is no object of the type of a socket: a constant, before a prompt runs; what comes
    through a link of any type when the node runs."""
    kind = Mapping if is_typeddict(socket.Type) else get_origin(socket.Type) or socket.Type  # lazy sound of other packs
    attributes = ATTRIBUTES.get(socket.io_type, "__class__").split()
    fits = any(hasattr(value, name) for name in attributes) and (kind is Any or isinstance(value, kind))
    fits = fits and (socket.io_type not in WHOLE or WHOLE[socket.io_type](value))
    if isinstance(value, Tensor) and value.shape[:1] == (0,):
        fits = fits and socket.id == "previous_frames"
    if not (runs and fits) and not (value is None and socket.optional):
        given = "nothing" if value is None else repr(value) if isinstance(value, (str, float)) else type(value).__name__
        given = f"{given} of {list(value.shape)}" if isinstance(value, Tensor) else given
        raise OptionError(
            f"{socket.id} takes {socket.io_type.replace(',', ' or ')}, and {given:.60} was given: connect a node that "
            "gives it"
        )


WHOLE: dict[str, Callable[[Any], bool]] = {
    "IMAGE": lambda images: images.ndim == 4 and 0 not in images.shape[1:],
    "MASK": lambda masks: 0 not in masks.shape,
    "SIGMAS": lambda sigmas: sigmas.ndim == 1,
    "LATENT": lambda latent: 0 not in getattr(latent.get("samples"), "shape", (0,)),
    "AUDIO": lambda audio: (
        0 not in getattr(audio.get("waveform"), "shape", (0,))[:1]
        and isinstance(audio.get("sample_rate"), (int, float))
    ),
    "CONDITIONING": lambda entries: all(
        isinstance(one, (list, tuple)) and len(one) == 2 and isinstance(one[0], Tensor) and isinstance(one[1], dict)
        for one in entries
    ),
}
"""By type of socket: whether an object has what nodes read of it. Frames before a clip may be none."""
ATTRIBUTES = {
    "MODEL": "model_options",
    "WANCORE_MODEL,MODEL": "patchers model_options",
    "CLIP": "tokenize",
    "VAE": "decode",
    "CLIP_VISION_OUTPUT": "penultimate_hidden_states",
    "AUDIO_ENCODER_OUTPUT": "keys",
}
"""By type of socket without a class: what its objects have, one of these."""
KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    io.Int.Input: ((int, float), "a whole number"),
    io.Float.Input: ((int, float), "a number"),
    io.Boolean.Input: ((bool, int), "true or false"),
    io.String.Input: ((str,), "a text"),
    io.Combo.Input: ((str,), "a word of its list"),
}


def check_number(name: str, value: float, low: float | None, high: float | None) -> None:
    """Raise OptionError for a number that is not finite, or outside of its limits."""
    below, above = low is not None and value < low, high is not None and value > high
    if below or above or (isinstance(value, float) and not isfinite(value)):
        limits = "" if low is None or high is None else f" from {low:g} to {high:g}"
        raise OptionError(f"{name} {value!r:.40} given; it takes a finite number{limits}")
