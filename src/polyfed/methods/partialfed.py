"""PartialFed: clients load only some layers of the average. Differences from the paper: docs/methods, one page per method."""

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
    """Select a part of the model by entry kind, or by a name pattern such as ``layer4.*``."""
    if text in PARTS:
        return PARTS[text]
    if isinstance(text, str) and any(sign in text for sign in "*?["):
        return Select(f"entry named {text}", names=(text,))
    raise OptionError(
        f"partialfed_fix: skip cannot contain {text!r}. Use {', '.join(PARTS)}, or name patterns with * such as 'layer4.*'."
    )


@register(shows=("skip",))
def partialfed_fix(skip: tuple[str, ...] = ("batch_norm", "head")) -> Method:
    """Upload all layers, but load only some of them.

        theta_k^{start, l} = A^l theta_glob^l + (1 - A^l) theta_k^{previous round, l},    A^l in {0, 1} set by hand, the same for all clients
        theta_glob <- sum_k p_k theta_k      all layers, loaded or not

    Args:
        skip: layers that clients do not load: batch_norm, head, bn_affine, bn_statistics, or patterns such as layer4.*; () is FedAvg.

    Reference:
        B. Sun et al. PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization. NeurIPS 2021.
        Also in FedWon Table 17.
    """
    if not isinstance(skip, tuple):
        raise OptionError(f'partialfed_fix: skip must be a list of parts such as ("batch_norm", "head"), got {skip!r}.')
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
    """Initial state of a client; ``sent`` is the server's payload."""

    sent: Mapping[str, Tensor]


def layer_of(name: str) -> str:
    return name.rpartition(".")[0]


def layers_of(client: Client) -> list[str]:
    """Return all modules that directly contain entries, in the order of the state."""
    return list(dict.fromkeys(layer_of(name) for name in client.bench.live))


@declare(stage="mix")
def mix(client: Client, entries: Mapping[str, Tensor]) -> Mixed:
    """Return the received entries, with kept layers replaced by the client's last ones."""
    logits, own = client.memory.get(MEMORY), client.state.entries
    made = Mixed(entries)
    if logits is not None:
        loads = dict(zip(layers_of(client), (logits.argmax(dim=1) == LOAD).tolist(), strict=True))
        made |= {name: own[name] for name in entries if name in own and not loads.get(layer_of(name), True)}
    made.sent = entries
    return made


@dataclass(frozen=True)
class LearnStrategy(Part):
    """Learn the logits with fixed weights, then start from the model that they select."""

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
        """Return the number of strategy steps, at least one."""
        settings = client.bench.settings
        whole = settings.local_steps or settings.local_epochs * math.ceil(len(client.data.train) / settings.batch_size)
        return max(1, int(self.share * whole))


def temperature(client: Client) -> float:
    """Return the temperature: 1.0 in the first round, 0.1 in the last."""
    return 1.0 - 0.9 * (client.round - 1) / max(client.rounds - 1, 1)


def between(client: Client, sent: Mapping[str, Tensor], own: Mapping[str, Tensor], z: Tensor) -> dict[str, Tensor]:
    """Interpolate each layer between the received state (z = 1) and the client's (z = 0); parameters pass gradients to z."""
    place = {layer: index for index, layer in enumerate(layers_of(client))}
    state: dict[str, Tensor] = {}
    for name, live in client.bench.live.items():
        # Copies, since layers write to buffers.
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

        theta_k^{start, l} = A_k^l theta_glob^l + (1 - A_k^l) theta_k^{previous round, l},    A_k^l = 1 if logit(load) >= logit(keep)

        strategy phase, weights unchanged:     z^l = Gumbel-softmax sample of the logits, one-hot forwards, soft backwards
                                               theta^l = z^l theta_glob^l + (1 - z^l) theta_k^l;   gradients of the task loss go to the logits only
        temperature:                           1.0 in the first round, falling linearly to 0.1 in the last
        theta_glob <- sum_k p_k theta_k        all layers

    Args:
        share: steps of the strategy phase as a fraction of the round's steps; 0 is FedAvg.
        strategy_lr: learning rate of the strategy's logits.

    Reference:
        B. Sun et al. PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization. NeurIPS 2021.
    """
    if not 0 <= share <= 1:
        raise OptionError(f"partialfed_adaptive: share must be between 0 and 1, got {share}.")
    if strategy_lr <= 0:
        raise OptionError(f"partialfed_adaptive: strategy_lr must be positive, got {strategy_lr}.")
    if share == 0:
        return Method("partialfed_adaptive")
    return Method(
        "partialfed_adaptive",
        sharing=(Rule(everything, keep=True),),
        receiving=(mix,),
        before_training=(LearnStrategy(share, strategy_lr),),
        facts=Facts(client_state=True, extra_work="a phase before training that learns which layers to load"),
    )
