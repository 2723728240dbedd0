"""DP-SGD: sample-level differential privacy. Differences from the paper: docs/methods/dp_sgd.md."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import vmap

from polyfed.core.client import Client, Step
from polyfed.core.entries import BatchNorm
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import declared
from polyfed.core.privacy import ACCOUNTS, looking_at_data, uncovered
from polyfed.core.workbench import Workbench
from polyfed.errors import JoinError, ModelError, SettingError
from polyfed.methods._shared.privacy_budget import (
    ACCOUNT,
    ACCOUNT_UPLOADS,
    SYSTEM,
    Account,
    Budget,
    NoteSpent,
    RequireBudget,
    note_accounts,
    require_budget,
    require_clip,
)
from polyfed.models.layers.sample_gradients import clipped_gradients, gradient_samplers
from polyfed.tasks.losses import needs_class_counts

MEMORY = "dp_sgd"
TRIES = 4


@dataclass(frozen=True)
class PoissonBatches(Account):
    """Batches in which every sample occurs independently with the same probability."""

    def __call__(self, client: Client) -> Iterator[Tensor]:
        rate, chance = self.rate(client), self.randomness(client, "batches")
        for _ in range(self.steps(client)):
            yield torch.nonzero(chance.uniform(len(client.data.train)) < rate).flatten()


@dataclass(frozen=True)
class NoisyGradient(Account):
    """The batch gradient: clipped per sample, summed, with noise, divided by the expected batch size."""

    clip: float = 1.0

    def __call__(self, step: Step) -> Tensor:
        client = step.client
        step.task_loss = torch.zeros((), device=client.bench.device)
        found = clipped(client, step, self.clip) if len(step.x) else {}
        chance = self.randomness(client, "noise", step.index)
        spread, expected = self.multiplier(client) * self.clip, self.rate(client) * len(client.data.train)
        for parameter in client.bench.parameters.values():
            if parameter.requires_grad:
                gradient = found[parameter] if parameter in found else torch.zeros_like(parameter)
                parameter.grad = chance.add_noise(gradient, spread).div_(expected)
        self.add_terms(step)
        return step.task_loss.detach()

    def add_terms(self, step: Step) -> None:
        """Add the gradients of loss terms that do not use the data, without noise."""
        terms = [term(step) for term in step.client.bench.method.objective]
        if terms:
            torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]

    def check(self, bench: Workbench) -> None:
        """Reject models without per-sample gradients, and uploads without noise."""
        refuse_batch_norm(bench)
        refuse_leaks(bench)
        refuse_class_weights(bench)
        if bench.settings.amp != "off":
            raise SettingError(f"{bench.method}: dp_sgd clips gradients in full precision. Use --amp off.")
        gradient_samplers()
        refuse_mixing(bench)

    def notice(self, bench: Workbench, clients: int) -> str:
        said = []
        if self.noise != SYSTEM:
            said.append(
                "dp_sgd draws its noise from the run's seed, so anyone who knows the seed can remove it. "
                'For real data, use dp_sgd(noise="system").'
            )
        if bench.batch_norms:
            said.append("dp_sgd: the batch-norm statistics come from --init and are not protected; they must be of public data.")
        return " ".join(said)


def clipped(client: Client, step: Step, clip: float) -> Mapping[nn.Parameter, Tensor]:
    """Return the sum of clipped gradients without non-finite samples, and set the step's loss to the mean of the others."""
    bench = client.bench

    def each(logits: Tensor, label: Tensor) -> Tensor:
        # One batch per sample, so that no loss can weight samples against each other.
        return bench.loss(logits[None], label[None])

    def losses() -> Tensor:
        step.logits = client.model(step.x)
        return vmap(each)(step.logits, step.y)

    found = clipped_gradients(client.model, losses, clip)
    finite = torch.isfinite(found.losses) & torch.isfinite(found.norms)
    if not bool(finite.all()):
        # Zero times infinity is not zero, so the sum excludes these samples. Rejecting the batch would reveal them without noise.
        step.x, step.y = step.x[finite], step.y[finite]
        if not len(step.x):
            return {}
        found = clipped_gradients(client.model, losses, clip)
    step.task_loss = found.losses.mean()
    return found.gradients


def refuse_batch_norm(bench: Workbench) -> None:
    """Reject batch norm, which mixes the samples of a batch, unless its statistics are frozen from the start."""
    paths = [path for path, module in bench.model.named_modules() if isinstance(module, BatchNorm)]
    if not paths:
        return
    if any(declared(hook).frozen_after(bench.settings.rounds) == 0 for hook in bench.method.before_training):
        if bench.settings.init is None:
            raise SettingError(
                f"{bench.method}: batch norm is frozen from round 1 and has no statistics yet. Start from public weights: --init FILE."
            )
        return
    named = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    raise ModelError(
        f"{bench.method}: dp_sgd needs per-sample gradients, but the batch norms of {type(bench.model).__name__} ({named}) mix the samples "
        "of a batch. Remove them with fedwon, or replace them with group_norm; fixbn(freeze_at=0) with --init FILE of public data keeps "
        "them frozen from the start."
    )


def refuse_leaks(bench: Workbench) -> None:
    """Reject parts that use the data other than through the noisy gradient."""
    method = bench.method
    mixing = [part.name for part in method.parts for surgery in part.surgery if declared(surgery).mixes_samples]
    if mixing:
        raise JoinError(
            f"{method}: {mixing[0]} mixes the samples of a batch, so there are no per-sample gradients. Remove {mixing[0]}."
        )
    for part, slot in looking_at_data(method):
        raise JoinError(
            f"{method}: {part} uses the data in its {slot.replace('_', ' ')}, where dp_sgd adds no noise. Remove {part}."
        )
    pooling = [part.name for part in method.parts if part.population is not None]
    for row in uncovered(method, bench.settings, bench.plan):
        if row.part not in pooling:
            raise JoinError(f"{method}: clients send {row.what}, which dp_sgd does not cover ({row.why}). Remove {row.part}.")


def refuse_class_weights(bench: Workbench) -> None:
    """Reject class weights: one sample changes the counts for all others, and weights cancel in a mean over one sample."""
    if needs_class_counts(bench.settings.loss):
        raise SettingError(
            f"{bench.method}: the loss {bench.settings.loss} weights samples by class. Weights from class counts let one sample change "
            "the gradients of others, which dp_sgd does not clip. In batches of one sample, the weights of cross_entropy cancel. "
            "Use a loss without class weights, such as --loss cross_entropy."
        )


def refuse_mixing(bench: Workbench) -> None:
    """Reject a model in which one sample affects the output for another, or that stores data about its inputs."""
    model = copy.deepcopy(bench.model).train()
    for module in model.modules():
        if isinstance(module, BatchNorm | nn.modules.dropout._DropoutNd):
            module.eval()
    before = {name: value.clone() for name, value in model.named_buffers()}
    one = torch.linspace(-1, 1, math.prod(bench.input_shape), device=bench.device).reshape(1, *bench.input_shape)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        apart = all(independent(model, one, seed) for seed in range(TRIES))
    if not apart:
        raise ModelError(
            f"{bench.method}: in {type(bench.model).__name__} one sample of a batch affects the output for another, so there are no "
            "per-sample gradients. Use a model without such layers."
        )
    changed = next((name for name, value in model.named_buffers() if not torch.equal(value, before[name])), None)
    if changed is not None:
        raise ModelError(
            f"{bench.method}: {type(bench.model).__name__} stores data about its inputs in {changed}, which dp_sgd would not cover. Use a model without such buffers."
        )
    refuse_hidden_parameters(bench, model, torch.cat([one, one.flip(-1)]))


def independent(model: nn.Module, one: Tensor, seed: int) -> bool:
    """Return True if the output for a sample does not depend on the other sample."""
    outputs = []
    for other in (one.flip(-1), 5 * one.square() - 1):
        torch.default_generator.manual_seed(seed)
        outputs.append(model(torch.cat([one, other]))[0])
    return torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)


def refuse_hidden_parameters(bench: Workbench, model: nn.Module, x: Tensor) -> None:
    """Reject parameters that are used outside their layer, where per-sample gradients would miss them."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def losses() -> Tensor:
        logits: Tensor = model(x)
        return logits.square().flatten(1).sum(1)

    found = clipped_gradients(model, losses, math.inf).gradients
    wanted = torch.autograd.grad(losses().sum(), list(named.values()), allow_unused=True)
    for (name, parameter), whole in zip(named.items(), wanted, strict=True):
        if whole is not None and (parameter not in found or not torch.allclose(found[parameter], whole, rtol=1e-2, atol=1e-3)):
            raise ModelError(
                f"{bench.method}: the gradient of {name} in {type(bench.model).__name__} cannot be computed per sample, because it is used outside "
                "its layer. Use a model whose layers contain their weights."
            )


@register(shows=("epsilon",))
def dp_sgd(epsilon: float = 8.0, delta: float = 1e-5, clip: float = 1.0, noise: str = "seed", planned_rounds: int = 0) -> Method:
    """Protect samples with differential privacy: clip per-sample gradients, and add noise.

        batch:      every sample of the client with probability q = B / N (Poisson sampling; a batch may be empty)
        gradient:   ( sum_i min(1, clip / ||g_i||) g_i + Normal(0, sigma^2 clip^2 I) ) / B
        sigma:      the smallest noise with which the planned steps of the run stay within (epsilon, delta)

    Args:
        epsilon: privacy budget per client for the whole run.
        delta: probability with which the guarantee may fail; well below 1 / (number of samples).
        clip: largest norm of one sample's gradient.
        noise: seed (reproducible, for studies) or system (the secure generator of the operating system, for real data).
        planned_rounds: number of rounds that the budget must cover, after which a client stops; 0: all rounds.

    Reference:
        M. Abadi et al. Deep Learning with Differential Privacy. CCS 2016.
        I. Mironov. Rényi Differential Privacy. CSF 2017.
    """
    require_budget("dp_sgd", epsilon, delta, noise, planned_rounds)
    require_clip("dp_sgd", clip)
    account = (Budget(epsilon, delta), planned_rounds, noise, MEMORY)
    return Method(
        "dp_sgd",
        sampling=PoissonBatches(*account),
        batch_gradient=NoisyGradient(*account, clip=clip),
        before_training=(RequireBudget(*account),),
        after_training=(NoteSpent(*account),),
        reply_extras={"train": {ACCOUNTS: ACCOUNT}},
        after_round=(note_accounts,),
        standalone=False,
        facts=Facts(
            client_state=True,
            data_derived_uploads=ACCOUNT_UPLOADS,
            granularity="aggregate",
            smallest_batch=1,
            extra_work="per-sample gradient norms, and noise",
            protects="samples",
            noise_at="client",
            noise_from="system" if noise == SYSTEM else "seed",
            epsilon=float(epsilon),
            delta=float(delta),
            withholds_loss=True,
        ),
    )
