"""PartialFed: everything is uploaded and averaged, but clients load only some layers; the others go on from their own last model.

    theta_k^{start, l} = A_k^l theta_glob^l + (1 - A_k^l) theta_k^{previous round, l};   theta_glob <- sum_k p_k theta_k, all layers
    partialfed_fix:        A is given, the same for all clients
    partialfed_adaptive:   A_k^l in {0, 1} is learnt by client k. A RECONSTRUCTION, NOT VERIFIED.

To learn A, a layer has two logits (load, keep). Before training, for a share of the round's steps, layers are mixed by a straight-through Gumbel-softmax
sample z of the logits, z theta_glob + (1 - z) theta_k, and gradients go to the logits only. Then A = the larger logit (load, if equal), and the client
trains the mixed model. The temperature falls from 1.0 to 0.1 over the rounds.

Reference: Sun et al., PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization, NeurIPS 2021.

Differences from the paper: no code of the authors was available to check against. A newcomer gets the average. The paper tries several fixed choices by hand
(bottom layers, top layers, without batch norm, without classifier); FedWon Table 17 does not say which it ran. The default here loads everything but batch
norm (affine and statistics) and the classifier. The paper broadcasts the whole model; layers that nobody would load are not sent here. How the strategy of
partialfed_adaptive is trained is our reconstruction: phase, temperature, learning rate of the logits. Its steps come before the usual local training and
are not taken off it. A layer is a module with entries of its own; its parameters and buffers are loaded or left together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from polyfed.core.client import Client
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part, declare
from polyfed.core.sharing import Rule, Select, batch_norm, bn_affine, bn_statistics, everything, head, upload_only
from polyfed.errors import OptionError

PARTS: dict[str, Select] = {"batch_norm": batch_norm, "head": head, "bn_affine": bn_affine, "bn_statistics": bn_statistics}


def selection(text: str) -> Select:
    """A part of the model by its kind, or by a pattern of names such as ``layer4.*``."""
    if text in PARTS:
        return PARTS[text]
    if isinstance(text, str) and any(sign in text for sign in "*?["):
        return Select(f"entry named {text}", names=(text,))
    raise OptionError(
        f"partialfed_fix: skip cannot name {text!r}. It takes {', '.join(PARTS)}, and patterns of names with * such as 'layer4.*'."
    )


@register(shows=("skip",))
def partialfed_fix(skip: tuple[str, ...] = ("batch_norm", "head")) -> Method:
    """Upload everything, load everything but some layers.

    Args:
        skip: what clients do not load: batch_norm, head, bn_affine, bn_statistics, and patterns of names such as layer4.*; () is FedAvg.
    """
    if not isinstance(skip, tuple):
        raise OptionError(f'partialfed_fix: skip takes a list of parts such as ("batch_norm", "head"), found {skip!r}.')
    chosen = [selection(text) for text in dict.fromkeys(skip)]
    needs_batch_norm = any(select.layers == batch_norm.layers for select in chosen)
    return Method(
        "partialfed_fix",
        sharing=tuple(map(upload_only, chosen)),
        facts=Facts(batch_norm=needs_batch_norm, client_state=bool(chosen)),
    )


MEMORY = "partialfed_logits"
LOAD = 0


class Mixed(dict[str, Tensor]):
    """What a client starts from; ``sent`` is what the server sent for it."""

    sent: Mapping[str, Tensor]


def layer_of(name: str) -> str:
    return name.rpartition(".")[0]


def layers_of(client: Client) -> list[str]:
    """All modules with entries of their own, in the order of the state."""
    return list(dict.fromkeys(layer_of(name) for name in client.bench.live))


@declare(stage="mix")
def mix(client: Client, entries: Mapping[str, Tensor]) -> Mixed:
    """What was sent, with layers the client keeps replaced by its own last ones."""
    logits, own = client.memory.get(MEMORY), client.state.entries
    made = Mixed(entries)
    if logits is not None:
        loads = dict(zip(layers_of(client), (logits.argmax(dim=1) == LOAD).tolist(), strict=True))
        made |= {name: own[name] for name in entries if name in own and not loads.get(layer_of(name), True)}
    made.sent = entries
    return made


@dataclass(frozen=True)
class LearnStrategy(Part):
    """Learn the logits with the weights as they are, then start from the model they choose."""

    share: float
    lr: float

    def __call__(self, client: Client) -> None:
        received = client.received
        own = client.brought({name: value for name, value in client.state.entries.items() if name in client.bench.live})
        if not isinstance(received, Mixed) or not own:
            return
        before = client.memory.get(MEMORY)
        logits = (torch.zeros(len(layers_of(client)), 2) if before is None else before.clone()).requires_grad_()
        for x, y in islice(client.batches(), self.steps(client)):
            z = F.gumbel_softmax(logits, tau=temperature(client), hard=True)[:, LOAD]
            state = between(client, received.sent, own, z)
            loss = client.bench.loss(functional_call(client.model, state, (x,)), y)
            (gradient,) = torch.autograd.grad(loss, logits)
            logits = (logits - self.lr * gradient).detach().requires_grad_()
        client.memory[MEMORY] = logits.detach()
        client.received = mix(client, received.sent)
        client.bench.load({name: value for name, value in client.received.items() if name in client.bench.live})

    def steps(self, client: Client) -> int:
        """How many of the round's steps the share is, at least one."""
        settings = client.bench.settings
        whole = settings.local_steps or settings.local_epochs * math.ceil(len(client.data.train) / settings.batch_size)
        return max(1, int(self.share * whole))


def temperature(client: Client) -> float:
    """1.0 in the first round, 0.1 in the last."""
    return 1.0 - 0.9 * (client.round - 1) / max(client.rounds - 1, 1)


def between(client: Client, sent: Mapping[str, Tensor], own: Mapping[str, Tensor], z: Tensor) -> dict[str, Tensor]:
    """The state between what was sent (z = 1) and the client's own (z = 0), layer by layer; gradients reach z through parameters."""
    place = {layer: index for index, layer in enumerate(layers_of(client))}
    state: dict[str, Tensor] = {}
    for name, live in client.bench.live.items():
        # Copies, since layers write into buffers.
        value = live.detach().clone()
        if name in sent and name in own and value.is_floating_point():
            weight = z[place[layer_of(name)]].to(value.dtype)
            weight = weight if name in client.bench.parameters else weight.detach()
            value = weight * sent[name] + (1 - weight) * own[name]
        state[name] = value
    return state


@register
def partialfed_adaptive(share: float = 0.2, strategy_lr: float = 0.1) -> Method:
    """Let each client learn which layers to load (a reconstruction, not verified).

    Args:
        share: steps of the strategy phase as a share of the round's steps; 0 never learns one: FedAvg.
        strategy_lr: learning rate of the strategy's logits.
    """
    if not 0 <= share <= 1:
        raise OptionError(f"partialfed_adaptive: share lies between 0 and 1, found {share}.")
    if strategy_lr <= 0:
        raise OptionError(f"partialfed_adaptive: strategy_lr must be positive, found {strategy_lr}.")
    if share == 0:
        return Method("partialfed_adaptive")
    return Method(
        "partialfed_adaptive",
        sharing=(Rule(everything, keep=True),),
        receiving=(mix,),
        before_training=(LearnStrategy(share, strategy_lr),),
        facts=Facts(client_state=True, extra_work="a phase before training that learns which layers to load"),
    )
