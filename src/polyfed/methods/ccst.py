"""CCST: cross-client style transfer. Differences from the paper: docs/methods/ccst.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.data_types import in_batches
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.replies import RequestContext
from polyfed.core.rounds import Payload
from polyfed.core.workbench import Workbench
from polyfed.errors import OptionError
from polyfed.extras import Array, From
from polyfed.methods._shared import require_choice
from polyfed.methods._shared.client_exchange import LARGEST_PIXEL, ClientExchange, input_type, pixel_range, require_images

EPS = 1e-5
UPLOADS = {
    "overall": "channel mean and std of its images, once",
    "single": "channel mean and std of each of its images, once",
}
EXCHANGE = ClientExchange("ccst")


def image_styles(x: Tensor) -> Tensor:
    """Return channel means and standard deviations of each image: (images, 2, channels)."""
    variance, mean = torch.var_mean(x, dim=(2, 3), correction=0)
    return torch.stack((mean, (variance + EPS).sqrt()), dim=1)


@dataclass(frozen=True)
class Measure(Part):
    """Reply with the client's style, or with one style per image."""

    mode: str

    def __call__(self, client: Client, payload: Payload) -> Payload:
        bench, moments = client.bench, []
        for x, _ in in_batches(client.data.train, bench.settings.test_batch_size):
            require_images("ccst", client, x)
            prepared = bench.preparation.for_testing(x)
            moments.append(image_styles(prepared) if self.mode == "single" else power_sums(prepared))
        if self.mode == "single":
            return Payload(extras={"given": torch.cat(moments)})
        mean, square = (torch.stack(moments).sum(dim=0) / len(client.data.train)).unbind()
        style = torch.stack((mean, (square - mean.square() + EPS).sqrt()))
        return Payload(extras={"given": style.to(torch.float32)[None]})


@dataclass(frozen=True)
class StyleShape:
    """The shape of a client's styles: (styles, 2, channels)."""

    mode: str

    def __call__(self, context: RequestContext) -> tuple[int, ...]:
        return (context.info.samples if self.mode == "single" else 1, 2, *context.server.input_shape[:1])


def deviation_problem(styles: Tensor) -> str:
    return "" if float(styles[:, 1].min()) >= 0 else "holds standard deviations below 0"


def power_sums(x: Tensor) -> Tensor:
    """Return the sums over images of the means and mean squares per channel, in double precision: (2, channels)."""
    wide = x.to(torch.float64)
    return torch.stack([part.mean(dim=(2, 3)).sum(dim=0) for part in (wide, wide.square())])


@dataclass(frozen=True)
class Restyle(Part):
    """Replace each image of a batch by ``copies`` images in styles of the sources."""

    copies: int
    alpha: float
    stage = "style"

    def __call__(self, client: Client, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        bank: list[Tensor] = EXCHANGE.bank(client)
        sources = chosen_sources(len(x), len(bank) + 1, self.copies or len(bank) + 1)
        copies = sources.shape[1]
        x, y = x.repeat_interleave(copies, dim=0), y.repeat_interleave(copies, dim=0)
        flat = sources.flatten()
        changed = torch.nonzero(flat).squeeze(1)
        if len(changed):
            styles = torch.stack([drawn_style(bank[source - 1]) for source in flat[changed].tolist()]).to(x)
            x[changed] = within_range(client, restyled(x[changed], styles, self.alpha))
        return x, y

    def notice(self, bench: Workbench, clients: int) -> str:
        EXCHANGE.refuse_one_client(clients)
        if self.copies > clients:
            raise OptionError(
                f"ccst: copies={self.copies}, but there are only {clients} sources. Use at most {clients}, or 0 for all."
            )
        return 'ccst runs with style="pixel": colour statistics instead of the paper\'s VGG-19 features.'


def chosen_sources(images: int, sources: int, copies: int) -> Tensor:
    """Draw different sources for each image from torch's default stream; 0 is the client's own style."""
    if copies == sources:
        return torch.arange(sources).expand(images, sources)
    return torch.rand(images, sources).argsort(dim=1)[:, :copies]


def drawn_style(given: Tensor) -> Tensor:
    return given[0] if len(given) == 1 else given[int(torch.randint(len(given), ()))]


def restyled(x: Tensor, styles: Tensor, alpha: float) -> Tensor:
    """Shift images towards the channel means and standard deviations of styles (images, 2, channels)."""
    own_mean, own_spread = image_styles(x)[..., None, None].unbind(dim=1)
    mean, spread = styles[..., None, None].unbind(dim=1)
    return torch.lerp(x, (x - own_mean) / own_spread * spread + mean, alpha)


def within_range(client: Client, x: Tensor) -> Tensor:
    ends = pixel_range(client, x)
    return x if ends is None else x.clamp(*ends)


@register(shows=("style",))
def ccst(style: str = "pixel", mode: str = "overall", copies: int = 0, alpha: float = 1.0) -> Method:
    """Train on images in the styles of the other clients.

        style_j     = (μ_j, σ_j)                                 channel means and standard deviations
        AdaIN(x, j) = σ_j (x − μ(x)) / σ(x) + μ_j                μ(x), σ(x): of the image itself
        x'          = (1 − alpha) x + alpha AdaIN(x, j)

    Args:
        style: pixel, the statistics of colour channels (the paper uses VGG-19 features, whose weights polyfed does not include).
        mode: overall: one style per client; single: one per image.
        copies: versions per image, each in the style of a different client, including its own; 0: one per client.
        alpha: strength of the style transfer; 0 is FedAvg, without an exchange.

    Reference:
        J. Chen, M. Jiang, Q. Dou and Q. Chen. Federated Domain Generalization for Image Recognition via Cross-Client Style
        Transfer. WACV 2023.
    """
    if style != "pixel":
        raise OptionError(f'ccst: style cannot be {style!r}. Use "pixel": polyfed does not include the AdaIN weights of the paper.')
    require_choice("ccst", "mode", mode, UPLOADS)
    if copies < 0 or not 0 <= alpha <= 1:
        raise OptionError(f"ccst: copies must not be negative and alpha must be between 0 and 1, got {copies} and {alpha}.")
    if alpha == 0:
        return Method("ccst")
    dtype: From[torch.dtype] = input_type if mode == "single" else torch.float32
    styles = Array(StyleShape(mode), dtype, -LARGEST_PIXEL, LARGEST_PIXEL, deviation_problem)
    return Method(
        "ccst",
        setup=(EXCHANGE,),
        answers={EXCHANGE.collect: Measure(mode), EXCHANGE.hand_out: EXCHANGE.keep},
        reply_extras={EXCHANGE.collect: {"given": styles}},
        inputs=(Restyle(copies, alpha),),
        facts=Facts(
            client_state=True,
            data_derived_uploads=UPLOADS[mode],
            granularity="per sample" if mode == "single" else "aggregate",
            extra_work=f"images times {copies or 'the number of clients'}",
        ),
    )
