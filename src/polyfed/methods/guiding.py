"""Guiding: the received head as a regulariser. Differences from the paper: docs/methods/guiding.md."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.func import functional_call

from polyfed.core.client import Client, Step
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.workbench import Workbench
from polyfed.errors import JoinError, OptionError
from polyfed.methods.partialfed import Mixed


def received_head(client: Client) -> dict[str, Tensor]:
    """Return the received state of the head, by name inside the head. Buffers are copied, since layers write to them."""
    bench = client.bench
    sent = client.received.sent if isinstance(client.received, Mixed) else client.received
    values = {name: sent.get(name, bench.live[name]).detach() for name in bench.head_entries}
    return {bench.head_entries[name]: value if name in bench.parameters else value.clone() for name, value in values.items()}


@dataclass(frozen=True)
class Guide(Part):
    """Add ``weight`` times the loss of the frozen received head on the client's features."""

    weight: float
    needs_features = True

    def __call__(self, step: Step) -> Tensor:
        bench = step.client.bench
        logits = functional_call(bench.head_module, received_head(step.client), (step.features,))
        return self.weight * bench.loss(logits, step.y)

    def check(self, bench: Workbench) -> None:
        """Require a known head that is sent in every round, and only one guiding term."""
        bench.require_head(f"{bench.method}: guiding")
        if sum(isinstance(term, Guide) for term in bench.method.objective) > 1:
            raise JoinError(f"{bench.method}: gperxan already includes the guiding term. Remove guiding, or use perxan + guiding.")
        sent = [set(phase.down) for phase in bench.plan.phases.values()]
        unsent = [name for name in bench.parameters if name in bench.head_entries and not all(name in down for down in sent)]
        if unsent:
            raise JoinError(
                f"{bench.method}: {unsent[0]} of the head is not sent to clients, so there is no received head to use. Remove guiding."
            )


@register(shows=("weight",))
def guiding(weight: float = 0.5) -> Method:
    """Guide features by the classifier from the server.

        loss_i = l(h_i(g_i(x)), y) + weight * l(h_received(g_i(x)), y)

    Args:
        weight: weight of the second loss; 0 disables it.

    Reference:
        K. Le, L. Ho, C. Do, D. Le-Phuoc and K.-S. Wong. Efficiently Assemble Normalization Layers and Regularization for
        Federated Domain Generalization. CVPR 2024. Equation 3 and Figure 2.
    """
    if weight < 0:
        raise OptionError(f"guiding: weight must not be negative, got {weight}.")
    return Method(
        "guiding",
        objective=(Guide(weight),) if weight else (),
        standalone=False,
        facts=Facts(class_labels=bool(weight), extra_work="one more head pass per step"),
    )
