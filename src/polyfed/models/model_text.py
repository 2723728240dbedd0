"""The text of a model: networks of libraries by their names, its variant with batch norm, and which images its weights want."""

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
    """A network of a library as a call of its builder; every other text as it is.

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
    """The options that the text of a model writes, by their names; none where the model is code of the user's own."""
    return models.options_in(as_call(text), SET_BY_RUN)


def lacks_options(text: str) -> bool:
    """Whether a model cannot be built from its text since options without a default are not written."""
    parameters = models.find(read_call(as_call(text)).name).signature.parameters.values()
    needed = {each.name for each in parameters if each.default is each.empty} - set(SET_BY_RUN)
    return bool(needed - set(written_options(text)))


def with_batch_norm(text: str) -> str:
    """The variant of a model that has batch norm, where its file names the option and the text has another value; else the text as it is.

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
    """Which images the weights want that a text asks for; None where it asks for none."""
    if text is None:
        return None
    options = written_options(text)
    find: Callable[[Mapping[str, Option]], ImagesOfWeights] | None
    find = models.find(read_call(as_call(text)).name).extra.get("images") if options else None
    return find(options) if find is not None and (options.get("pretrained") or options.get(WEIGHTS)) else None


def weights_file(text: str) -> str | None:
    """The file of weights that a text names; None where it names none."""
    file = written_options(text).get(WEIGHTS)
    return file if isinstance(file, str) and file else None


def with_absolute_weights(text: str) -> str:
    """The text of a model whose file of weights is found from every working folder."""
    file = weights_file(text)
    if file is None or os.path.isabs(file):
        return text
    return write_call(read_call(as_call(text)).name, written_options(text) | {WEIGHTS: os.path.abspath(os.path.expanduser(file))})
