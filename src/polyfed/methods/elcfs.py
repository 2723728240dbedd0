"""ELCFS (FedDG): episodic learning in continuous frequency space. Differences from the paper: docs/methods/elcfs.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from polyfed.core.client import Client, Step
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.replies import RequestContext
from polyfed.core.rounds import Payload
from polyfed.core.workbench import Workbench
from polyfed.errors import ClientFailure, DataError, OptionError
from polyfed.extras import Array
from polyfed.methods._shared.client_exchange import LARGEST_PIXEL, ClientExchange, input_type, pixel_range, require_images

EXCHANGE = ClientExchange("elcfs")
IMAGE_AXES = (-2, -1)
RATIOS = 9


def spectra(x: Tensor) -> Tensor:
    """Return Fourier transforms of images, with the zero frequency at the centre."""
    shifted: Tensor = torch.fft.fftshift(torch.fft.fft2(x), dim=IMAGE_AXES)
    return shifted


def amplitudes(x: Tensor) -> Tensor:
    """Return amplitude spectra of images, with the zero frequency at the centre."""
    return spectra(x).abs()


def to_pixels(client: Client, x: Tensor) -> Tensor:
    """Scale prepared inputs to pixels from 0 to 255; inputs of unknown range are returned unchanged."""
    ends = pixel_range(client, x)
    return x if ends is None else (x - ends[0]) / (ends[1] - ends[0]) * 255


def from_pixels(client: Client, x: Tensor) -> Tensor:
    """Invert ``to_pixels``, and clamp to the pixel range."""
    ends = pixel_range(client, x)
    return x if ends is None else x.clamp(0, 255) / 255 * (ends[1] - ends[0]) + ends[0]


@dataclass(frozen=True)
class SendSpectra(Part):
    """Reply with the spectra of some training images, or their mean."""

    share: float
    aggregate: bool

    def __call__(self, client: Client, payload: Payload) -> Payload:
        train = client.data.train
        count = max(1, int(self.share * len(train)))
        if self.aggregate and count < 2:
            raise DataError(
                f"elcfs(aggregate=True): {_format_share(self.share)} of the {len(train)} images of client {client.id} is one image, whose spectrum would be sent unchanged. Use a share of at least 2/{len(train)}, or aggregate=False."
            )
        x, _ = train.batch(torch.randperm(len(train), generator=client.generator)[:count])
        require_images("elcfs", client, x)
        found = amplitudes(to_pixels(client, client.bench.preparation.for_testing(x)))
        return Payload(extras={"given": found.mean(dim=0, keepdim=True) if self.aggregate else found})


@dataclass(frozen=True)
class SpectraShape:
    """The shape of a client's spectra: (spectra, channels, height, width)."""

    share: float
    aggregate: bool

    def __call__(self, context: RequestContext) -> tuple[int, ...]:
        return (1 if self.aggregate else max(1, int(self.share * context.info.samples)), *context.server.input_shape)


def largest_amplitude(context: RequestContext) -> float:
    """Return the amplitude of an image with the largest possible brightness everywhere."""
    return LARGEST_PIXEL * math.prod(context.server.input_shape[1:])


def mixed(x: Tensor, others: Tensor, ratio: Tensor, half_width: int) -> Tensor:
    """Mix the low frequencies of other amplitude spectra into images; ``ratio`` is the weight of an image's own spectrum."""
    spectrum = spectra(x)
    amplitude, phase = spectrum.abs(), spectrum.angle()
    rows, columns = (slice(size // 2 - half_width, size // 2 + half_width + 1) for size in x.shape[-2:])
    low = (..., rows, columns)
    amplitude[low] = torch.lerp(others[low], amplitude[low], ratio.view(-1, 1, 1, 1))
    whole = torch.fft.ifftshift(torch.polar(amplitude, phase), dim=IMAGE_AXES)
    image: Tensor = torch.fft.ifft2(whole).real
    return image


@dataclass(frozen=True)
class OuterLoss(Part):
    """Add the loss on frequency-mixed images after one clipped step on the batch."""

    low: float
    beta: float
    clip: float
    weight: float
    first_order: bool
    runs_model = True

    def __call__(self, step: Step) -> Tensor:
        client, bench = step.client, step.client.bench
        moved = self.stepped(step)
        untouched = {name: value.detach().clone() for name, value in bench.live.items() if name not in bench.parameters}
        logits = functional_call(bench.model, {**untouched, **moved}, (self.images(client, step.x),))
        return self.weight * bench.loss(logits, step.y)

    def stepped(self, step: Step) -> dict[str, Tensor]:
        """Return the parameters after one step along the clipped task-loss gradient, as a differentiable function of them."""
        parameters = {name: p for name, p in step.client.bench.parameters.items() if p.requires_grad}
        second = not self.first_order
        found = torch.autograd.grad(
            step.task_loss, list(parameters.values()), create_graph=second, retain_graph=True, allow_unused=True
        )
        slopes = zip(parameters.items(), found, strict=True)
        return {n: p if slope is None else p - self.beta * slope.clamp(-self.clip, self.clip) for (n, p), slope in slopes}

    @torch.no_grad()
    def images(self, client: Client, x: Tensor) -> Tensor:
        """Return a batch with the low frequencies of other clients, drawn from torch's default stream."""
        others = drawn_spectra(EXCHANGE.bank(client), x)
        ratio = (1 + torch.randint(RATIOS, (len(x),))).to(x) / (RATIOS + 1)
        half_width = int(self.low * min(x.shape[-2:]))
        return from_pixels(client, mixed(to_pixels(client, x), others, ratio, half_width))

    def notice(self, bench: Workbench, clients: int) -> str:
        EXCHANGE.refuse_one_client(clients)
        return ""


def drawn_spectra(bank: list[Tensor], x: Tensor) -> Tensor:
    """Draw a random spectrum of a random client for each image."""
    if bank[0].shape[1:] != x.shape[1:]:
        raise ClientFailure(
            f"elcfs: the batch has images of shape {tuple(x.shape[1:])}, the exchanged spectra {tuple(bank[0].shape[1:])}. "
            "Use an augmentation that keeps the size, and images of one size."
        )
    clients = torch.randint(len(bank), (len(x),)).tolist()
    return torch.stack([bank[index][int(torch.randint(len(bank[index]), ()))] for index in clients]).to(x)


@register
def elcfs(
    low: float = 0.01,
    beta: float = 1e-3,
    clip: float = 1.0,
    share: float = 0.125,
    aggregate: bool = False,
    first_order: bool = False,
    weight: float = 1.0,
) -> Method:
    """Exchange amplitude spectra, and train so that images with low frequencies of other clients are also classified correctly.

        A, P   = |FFT2(x)|, phase(FFT2(x))
        A_mix  = ratio A + (1 − ratio) A_other   in the centred square of half-width b = floor(L min(H, W)), A outside;   ratio from {0.1, …, 0.9}
        x_freq = IFFT2(A_mix, P)
        w'     = w − beta clip(∇_w l(f(x; w), y), −c, c)
        loss   = l(f(x; w), y) + weight l(f(x_freq; w'), y)

    Args:
        low: L: half-width of the exchanged square of low frequencies, as a fraction of the smaller side; 0: only the mean colour.
        beta: learning rate of the inner step.
        clip: largest absolute value of its gradient.
        share: fraction of its training images whose spectra a client sends; at least one image (two with aggregate).
        aggregate: send the mean of these spectra instead of each one.
        first_order: treat the inner gradient as a constant, which is faster.
        weight: weight of the outer loss; 0 is FedAvg, without an exchange.

    Reference:
        Q. Liu, C. Chen, J. Qin, Q. Dou and P.-A. Heng. FedDG: Federated Domain Generalization on Medical Image Segmentation via
        Episodic Learning in Continuous Frequency Space. CVPR 2021.
    """
    if not 0 <= low < 0.5 or not 0 < share <= 1:
        raise OptionError(f"elcfs: low must be in [0, 0.5) and share in (0, 1], got low={low} and share={share}.")
    if beta < 0 or clip <= 0 or weight < 0:
        raise OptionError(
            f"elcfs: beta and weight must not be negative and clip must be positive, got {beta}, {weight} and {clip}."
        )
    if weight == 0:
        return Method("elcfs")
    return Method(
        "elcfs",
        setup=(EXCHANGE,),
        answers={EXCHANGE.collect: SendSpectra(share, aggregate), EXCHANGE.hand_out: EXCHANGE.keep},
        reply_extras={EXCHANGE.collect: {"given": Array(SpectraShape(share, aggregate), input_type, 0, largest_amplitude)}},
        objective=(OuterLoss(low, beta, clip, weight, first_order),),
        facts=Facts(
            client_state=True,
            data_derived_uploads=f"{'the mean of ' if aggregate else ''}amplitude spectra of {_format_share(share)} of its training images, once",
            granularity="aggregate" if aggregate else "per sample",
            extra_work="a second pass and an additional gradient" + ("" if first_order else ", taken through the first: about 5x"),
        ),
    )


def _format_share(share: float) -> str:
    return "an eighth" if share == 0.125 else f"{share:.0%}"
