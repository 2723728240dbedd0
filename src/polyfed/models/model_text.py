"""Model expressions: library networks, variants with batch norm, and weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from polyfed.models import models
from polyfed.models.weights import ImagesOfWeights
from polyfed.text import Option, read_call, write_call, write_option
from polyfed.trust import LIBRARIES

SET_BY_RUN = ("classes", "input_shape")
WEIGHTS = "weights"


def as_call(text: str) -> str:
    """Convert a library network to a call of its builder, and return other expressions unchanged.

    >>> as_call("timm:resnet18d(pretrained=True)")
    'timm(name="resnet18d", pretrained=True)'
    """
    library, colon, network = text.partition(":")
    if not colon or library not in LIBRARIES:
        return text
    name, _, options = network.partition("(")
    rest = options.strip().removesuffix(")").strip()
    return f"{library}(name={write_option(name.strip())}{f', {rest}' if rest else ''})"


def written_options(text: str) -> dict[str, Option]:
    """Return the options in a model expression; empty for a custom model."""
    return models.options_in(as_call(text), SET_BY_RUN)


def lacks_options(text: str) -> bool:
    """Return True if the expression omits an option that has no default."""
    parameters = models.find(read_call(as_call(text)).name).signature.parameters.values()
    needed = {each.name for each in parameters if each.default is each.empty} - set(SET_BY_RUN)
    return bool(needed - set(written_options(text)))


def with_batch_norm(text: str) -> str:
    """Return the variant of a model with batch norm if the model declares one, otherwise the expression unchanged.

    >>> with_batch_norm("hfedf_cnn")
    'hfedf_cnn(norm="batch")'
    >>> with_batch_norm("lenet")
    'lenet'
    """
    name = text.split("(")[0].strip()
    if name not in models:
        return text
    record, written = models.find(name), written_options(text)
    variant: Mapping[str, Option] = record.extra.get("batch_norm", {})
    defaults = {key: record.signature.parameters[key].default for key in variant}
    has_it = all((defaults | written)[key] == value for key, value in variant.items())
    return text if has_it else write_call(read_call(text).name, written | dict(variant))


def images_of_weights(text: str | None) -> ImagesOfWeights | None:
    """Return the images that the weights in an expression were trained on; None if it has no weights."""
    if text is None:
        return None
    options = written_options(text)
    find: Callable[[Mapping[str, Option]], ImagesOfWeights] | None
    find = models.find(read_call(as_call(text)).name).extra.get("images") if options else None
    return find(options) if find is not None and (options.get("pretrained") or options.get(WEIGHTS)) else None


def weights_file(text: str) -> str | None:
    """Return the weights file in an expression; None if it has none."""
    file = written_options(text).get(WEIGHTS)
    return file if isinstance(file, str) and file else None


def with_absolute_weights(text: str) -> str:
    """Make the path of the weights file absolute."""
    file = weights_file(text)
    if file is None or os.path.isabs(file):
        return text
    return write_call(read_call(as_call(text)).name, written_options(text) | {WEIGHTS: os.path.abspath(os.path.expanduser(file))})
