"""What words in the name of a recipe or of a row claim of the model that is built."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from polyfed.core.data_types import Federation
from polyfed.data.partitions.federate import federate
from polyfed.data.placeholders import blank_federation
from polyfed.methods.weight_standard import KINDS as STANDARDISED
from polyfed.settings import Settings
from polyfed.studies.compare.recipes.checks import embedded, record_of

Norms = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


def federation_for(settings: Settings) -> Federation:
    """Clients with blank images of the data set that settings name, or with its own where it is made in code."""
    record = record_of(settings.data)
    assert record is not None
    if "declaration" in record.extra:
        return blank_federation(settings.data, record, settings.unseen)
    return federate(embedded(settings.data), "domain", settings.unseen)


def has(model: nn.Module, *kinds: type) -> bool:
    return any(isinstance(module, kinds) for module in model.modules())


def standardises(model: nn.Module) -> bool:
    return has(model, *STANDARDISED.values())


def keeps_batch_norm(model: nn.Module) -> bool:
    return has(model, nn.modules.batchnorm._BatchNorm)


def has_group_norm(model: nn.Module) -> bool:
    return has(model, nn.GroupNorm) and not keeps_batch_norm(model)


Check = Callable[[nn.Module], bool]
OF_LABELS: dict[str, Check] = {
    r"\bGN\b|group norm": has_group_norm,
    r"\bLN\b|layer[ _]norm": lambda model: has(model, nn.LayerNorm, nn.GroupNorm) and not keeps_batch_norm(model),
    r"\bBN\b|with batch norm": keeps_batch_norm,
    r"\bWS\b": standardises,
    r"norm-free|FedWon": lambda model: not has(model, *Norms),
}
"""Words in the first part of a title ("GN+WS on PACS ..."), and what the model must then be."""
