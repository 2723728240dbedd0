"""Reconstruct images from the gradient of one client's first step (gradient inversion), for several methods.

    x* = argmin_x  1 - cos(gradient of the loss at x, observed gradient) + weight * total variation of x

The attacker knows the labels, pixels stay within their range, and the model is in training mode, like the client's. A gradient does not
reveal the order of images of one class, so the best order is scored. The result is a lower bound: stronger attacks recover more.

Reference: Geiping et al., Inverting Gradients: How Easy Is It to Break Privacy in Federated Learning?, NeurIPS 2020. This attack takes 300
steps of Adam with signed gradients (24,000 in the paper), with weight 0.1 for the total variation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.seeds import default_stream, generator
from polyfed.core.workbench import ClientState, Workbench
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings, with_changes

STEPS, STEP_SIZE, VARIATION = 300, 0.1, 0.1
METHODS = ("fedavg", "fedavg + group_norm", "fedwon")


def invert(settings: Settings, methods: Sequence[str] = METHODS, images: int = 2, steps: int = STEPS) -> list[dict[str, Any]]:
    """Invert the first gradient of the first client under each method, with the same images for all methods."""
    return [invert_one(Experiment(with_changes(settings, {"method": method})), images, steps) for method in methods]


def invert_one(experiment: Experiment, images: int, steps: int) -> dict[str, Any]:
    """Return the images of a client's first batch and their reconstructions."""
    experiment.federation.task.require_class_labels("Gradient inversion")
    client, x, y, pixels = first_batch(experiment, images)
    with default_stream(experiment.settings.seed, "inversion"):
        client.optimizer = client.make_optimizer()
        client.backward(0, x, y)
    parameters = [p for p in client.bench.parameters.values() if p.grad is not None]
    observed = [p.grad.detach().clone() for p in parameters if p.grad is not None]
    found = in_best_order(search(client, parameters, observed, x.shape, y, steps, pixels), x, y)
    error = float((found - x).square().mean())
    spread = float((pixels[1] - pixels[0]).max())
    return {
        "method": str(experiment.method),
        "client": client.id,
        "images": len(x),
        "mean_squared_error": error,
        "psnr": 10 * math.log10(spread**2 / max(error, 1e-12)),
        "cosine_distance": float(angle([g.detach() for g in gradients_at(client, parameters, found, y)], observed)),
        "original": x,
        "found": found,
        "pixels": pixels,
        "lower_bounds": True,
    }


def first_batch(experiment: Experiment, images: int) -> tuple[Client, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return a client in training mode with the initial model, some of its preprocessed images, their labels, and the pixel range."""
    bench, data = experiment.bench, experiment.federation.clients[0]
    client = Client(data, bench, ClientState(), 1)
    client.receive(experiment.server.outgoing(client.id))
    bench.model.train()
    stream = generator(experiment.settings.seed, "inversion", data.id)
    x, y = data.train.batch(torch.randperm(len(data.train), generator=stream)[:images])
    ready = bench.preparation.for_testing(x.to(bench.device))
    return client, ready, y.to(bench.device), pixel_range(bench, x, ready)


def pixel_range(bench: Workbench, raw: Tensor, ready: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest pixel per channel: the preprocessed 0 and 255 for bytes, or the range of the images for floats."""
    if raw.dtype != torch.uint8:
        return ready.min(), ready.max()
    one = torch.zeros_like(raw[:1, ..., :1, :1]).to(bench.device)
    return bench.preparation.for_testing(one), bench.preparation.for_testing(one + 255)


def in_best_order(found: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Match the images of each label to the originals so that the total error is smallest."""
    ordered = found.clone()
    for label in sorted(set(y.tolist())):
        places = torch.nonzero(y == label).flatten()
        errors = (found[places][None] - x[places][:, None]).square().flatten(2).mean(2)
        rows, columns = linear_sum_assignment(errors.cpu().numpy())
        ordered[places[rows]] = found[places[columns]]
    return ordered


def gradients_at(client: Client, parameters: Sequence[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient for the given images, as a differentiable function of them."""
    with default_stream(client.bench.settings.seed, "inversion"):
        loss = client.bench.loss(client.model(x), y)
    return torch.autograd.grad(loss, list(parameters), create_graph=True, allow_unused=True, materialize_grads=True)


def angle(found: Sequence[Tensor], observed: Sequence[Tensor]) -> Tensor:
    """Return one minus the cosine between two gradients over all parameters."""
    product = torch.stack([(a * b).sum() for a, b in zip(found, observed, strict=True)]).sum()
    lengths = [torch.stack([a.square().sum() for a in each]).sum().sqrt() for each in (found, observed)]
    return 1 - product / (lengths[0] * lengths[1]).clamp_min(1e-12)


def search(
    client: Client,
    parameters: Sequence[Tensor],
    observed: Sequence[Tensor],
    shape: torch.Size,
    y: Tensor,
    steps: int,
    pixels: tuple[Tensor, Tensor],
) -> Tensor:
    """Optimise random images until their gradient points in the direction of the observed one."""
    x = torch.randn(shape, generator=generator(client.bench.settings.seed, "guess")).to(y.device).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=STEP_SIZE)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = STEP_SIZE * (0.1 ** (step * 3 // max(steps, 1)))
        objective = angle(gradients_at(client, parameters, x, y), observed) + VARIATION * total_variation(x)
        (slope,) = torch.autograd.grad(objective, x)
        x.grad = slope.sign()
        optimizer.step()
        x.data.clamp_(*pixels)
    return x.detach()


def total_variation(x: Tensor) -> Tensor:
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Save a figure with the original images in the first row and one row of reconstructions per method."""
    from matplotlib.figure import Figure

    columns = len(results[0]["original"])
    figure = Figure(figsize=(1.6 * columns + 1.6, 1.6 * (len(results) + 1)))
    rows = [
        ("original", results[0]["original"]),
        *((f"{each['method']}\n{each['psnr']:.1f} dB".replace(" + ", "\n+ "), each["found"]) for each in results),
    ]
    for place, (label, images) in enumerate(rows):
        for column in range(columns):
            axis = figure.add_subplot(len(rows), columns, place * columns + column + 1)
            axis.imshow(as_pixels(images[column], *results[0]["pixels"]))
            axis.set_xticks([])
            axis.set_yticks([])
            if column == 0:
                axis.set_ylabel(label, fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def as_pixels(image: Tensor, low: Tensor, high: Tensor) -> Any:
    scaled = ((image[None] - low) / (high - low).clamp_min(1e-6))[0].clamp(0, 1).cpu()
    return (scaled.expand(3, -1, -1) if len(scaled) == 1 else scaled).permute(1, 2, 0).numpy()
