"""Parameter counts of the papers' networks, computed from their layer tables, which are transcribed here independently."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from helpers.networks import operated, parameters
from polyfed.methods._shared.hypernetwork import Hypernetwork
from polyfed.models import models


def conv(fan_in: int, fan_out: int, side: int, bias: bool = True, groups: int = 1) -> int:
    return fan_out * (fan_in // groups) * side * side + (fan_out if bias else 0)


def linear(fan_in: int, fan_out: int) -> int:
    return fan_in * fan_out + fan_out


def norm(channels: int) -> int:
    return 2 * channels


def conv_norm(fan_in: int, fan_out: int, side: int, bias: bool = False, groups: int = 1) -> int:
    return conv(fan_in, fan_out, side, bias, groups) + norm(fan_out)


def plain(rows: Sequence[tuple[int, int, int]], norms: bool) -> int:
    """Convolutions with a bias; each has a norm or, as in FedWon, a gain per output channel instead."""
    return sum(conv(*row) + (norm(row[1]) if norms else row[1]) for row in rows)


DIGITS = ((3, 64, 5), (64, 64, 5), (64, 128, 5))
DIGITS_LINEAR = linear(6272, 2048) + linear(2048, 512) + linear(512, 10)
ALEXNET = ((3, 64, 11), (64, 192, 5), (192, 384, 3), (384, 256, 3), (256, 256, 3))
ALEXNET_LINEAR = linear(9216, 4096) + linear(4096, 4096) + linear(4096, 10)


def hfedf_client(classes: int) -> int:
    stem = conv(3, 32, 3) + conv(32, 32, 1) + conv(32, 64, 3)
    inceptions = sum(conv(c, 32, 1) + conv(c, 64, 3) + conv(c, 16, 5) for c in (64, 176))
    return stem + inceptions + linear(2592, 256) + linear(256, classes)


def hfedf_tensors(classes: int) -> list[int]:
    """The sizes of the client's tensors, weight and bias of each layer, in order."""
    layers = [(3, 32, 3), (32, 32, 1), (32, 64, 3), *((c, o, k) for c in (64, 176) for o, k in ((32, 1), (64, 3), (16, 5)))]
    return [
        size for i, o, k in layers for size in (i * o * k * k, o)
    ] + [2592 * 256, 256, 256 * classes, classes]  # fmt: skip


def basic_blocks(stages: Sequence[tuple[int, int, int]], projected: bool) -> int:
    """Residual blocks of two 3x3 convolutions: (channels in, channels out, blocks) by stage."""
    total = 0
    for fan_in, fan_out, blocks in stages:
        total += conv_norm(fan_in, fan_out, 3) + conv_norm(fan_out, fan_out, 3)
        total += conv_norm(fan_in, fan_out, 1) if projected and fan_in != fan_out else 0
        total += (blocks - 1) * 2 * conv_norm(fan_out, fan_out, 3)
    return total


RESNET18_BODY = conv_norm(3, 64, 7) + basic_blocks(((64, 64, 2), (64, 128, 2), (128, 256, 2), (256, 512, 2)), projected=True)


def resnet50(classes: int) -> int:
    total, fan_in = conv_norm(3, 64, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            total += conv_norm(fan_in, width, 1) + conv_norm(width, width, 3) + conv_norm(width, 4 * width, 1)
            total += conv_norm(fan_in, 4 * width, 1) if block == 0 else 0
            fan_in = 4 * width
    return total + linear(2048, classes)


def mobilenet_v2_body() -> int:
    """Expansion, channels, repeats (Sandler et al. 2018, Table 2)."""
    total, fan_in = conv_norm(3, 32, 3), 32
    for expansion, channels, repeats in ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1)):
        for _ in range(repeats):
            hidden = expansion * fan_in
            total += conv_norm(fan_in, hidden, 1) if expansion > 1 else 0
            total += conv_norm(hidden, hidden, 3, groups=hidden) + conv_norm(hidden, channels, 1)
            fan_in = channels
    return total + conv_norm(320, 1280, 1)


def densenet121(classes: int) -> int:
    """Growth 32, bottlenecks of 128 (Huang et al. 2017, Table 1); the norm comes before its convolution."""
    total, channels = conv_norm(3, 64, 7), 64
    for number, layers in enumerate((6, 12, 24, 16)):
        for _ in range(layers):
            total += norm(channels) + conv(channels, 128, 1, bias=False) + norm(128) + conv(128, 32, 3, bias=False)
            channels += 32
        if number < 3:
            total += norm(channels) + conv(channels, channels // 2, 1, bias=False)
            channels //= 2
    return total + norm(channels) + linear(channels, classes)


def deeplabv3plus(body: int, deep: int, shallow: int, classes: int) -> int:
    """Pyramid of a 1x1, three separable 3x3 and an image-wide branch of 256 channels; decoder with 48 shallow channels (Chen et al. 2018)."""

    def separable(fan_in: int, fan_out: int) -> int:
        return conv(fan_in, fan_in, 3, bias=False, groups=fan_in) + conv_norm(fan_in, fan_out, 1)

    pyramid = conv_norm(deep, 256, 1) + 3 * separable(deep, 256) + conv_norm(deep, 256, 1) + conv_norm(5 * 256, 256, 1)
    decoder = separable(256, 256) + conv_norm(shallow, 48, 1) + separable(256 + 48, 256)
    return body + pyramid + decoder + conv(256, classes, 1)


LENET = conv(3, 6, 5) + conv(6, 16, 5) + linear(400, 120) + linear(120, 84) + linear(84, 10)
NETWORKS = [
    ("six_layer_cnn", 10, 28, plain(DIGITS, norms=True) + DIGITS_LINEAR),
    ('six_layer_cnn(variant="fedbn_original")', 10, 28, plain(DIGITS, norms=True) + norm(2048) + norm(512) + DIGITS_LINEAR),
    ("alexnet_fedwon", 10, 256, plain(ALEXNET, norms=True) + ALEXNET_LINEAR),
    ('alexnet_fedwon(variant="fedbn_original")', 10, 256, plain(ALEXNET, norms=True) + 2 * norm(4096) + ALEXNET_LINEAR),
    ("hfedf_cnn", 7, 32, hfedf_client(7)),
    ("hfedf_cnn", 65, 32, hfedf_client(65)),
    ("hfedf_autoencoder(latent=1)", 7, 32, conv(3, 16, 3) + conv(16, 32, 3) + linear(2048, 1) + linear(1, 2048) + 2064 + 195),
    ("resnet18", 8, 64, RESNET18_BODY + linear(512, 8)),
    ("mobilenet_v2", 10, 32, mobilenet_v2_body() + linear(1280, 10)),
    (
        "resnet20",
        10,
        32,
        conv_norm(3, 16, 3) + basic_blocks(((16, 16, 3), (16, 32, 3), (32, 64, 3)), projected=False) + linear(64, 10),
    ),
    ('lenet(norm="none")', 10, 32, LENET),
    ("lenet", 10, 32, LENET + norm(6) + norm(16)),
    ("resnet50", 7, 64, resnet50(7)),
    ("densenet121", 2, 64, densenet121(2)),
    ("deeplabv3plus", 19, 64, deeplabv3plus(mobilenet_v2_body(), 1280, 24, 19)),
    ('deeplabv3plus(encoder="resnet18")', 19, 64, deeplabv3plus(RESNET18_BODY, 512, 64, 19)),
]


@pytest.mark.parametrize(("text", "classes", "side", "expected"), NETWORKS, ids=[f"{row[0]}-{row[1]}" for row in NETWORKS])
def test_a_network_learns_as_many_numbers_as_its_table_says(text: str, classes: int, side: int, expected: int) -> None:
    if text.startswith("deeplab"):
        pytest.importorskip("segmentation_models_pytorch", reason="needs the extra polyfed[segmentation]")
    with torch.device("meta"):
        model = models.build(text, classes=classes, input_shape=(3, side, side))
    assert parameters(model) == expected


@pytest.mark.parametrize(
    ("text", "side", "convolutions", "rest"),
    [("six_layer_cnn", 28, DIGITS, DIGITS_LINEAR), ("alexnet_fedwon", 256, ALEXNET, ALEXNET_LINEAR)],
)
def test_the_columns_of_fedwons_tables(text: str, side: int, convolutions: Sequence[tuple[int, int, int]], rest: int) -> None:
    """FedWon's own networks have a gain in each convolution and no norm; those with group or layer norm have as many numbers as with batch norm."""

    def built(method: str) -> nn.Module:
        with torch.device("meta"):
            return operated(models.build(text, classes=10, input_shape=(3, side, side)), method)

    assert parameters(built("fedwon")) == plain(convolutions, norms=False) + rest
    assert parameters(built("fedavg + group_norm")) == parameters(built("fedavg + layer_norm")) == plain(convolutions, True) + rest


def test_hfedfs_hypernetwork() -> None:
    """Table 8: an embedding, four linear layers of width 50, and a linear head for each tensor of the client's network."""
    with torch.device("meta"):
        client = models.build("hfedf_cnn", classes=7, input_shape=(3, 32, 32))
    shapes = {name: tuple(value.shape) for name, value in client.named_parameters()}
    assert [value.numel() for value in client.parameters()] == hfedf_tensors(7)
    heads = sum(linear(50, size) for size in hfedf_tensors(7))
    with torch.device("meta"):
        made = Hypernetwork(clients=3, shapes=shapes, dimension=1, width=50)
    assert parameters(made) == 3 * 1 + linear(1, 50) + 3 * linear(50, 50) + heads
