"""Train a custom model on a folder of images, <domain>/<class>/*.png."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw
from torch import nn

import polyfed

BACKGROUNDS = {"day": "white", "dusk": "orange", "fog": "lightblue"}
BARS = {"lying": (18, 5), "standing": (5, 18)}


def draw_images(root: Path, per_class: int = 30) -> None:
    """Draw grey bars on three backgrounds, as placeholders for your photographs."""
    place = random.Random(0)
    for domain, background in BACKGROUNDS.items():
        for name, (width, height) in BARS.items():
            folder = root / domain / name
            folder.mkdir(parents=True)
            for number in range(per_class):
                image = Image.new("RGB", (32, 32), background)
                left, top = place.randint(1, 31 - width), place.randint(1, 31 - height)
                ImageDraw.Draw(image).rectangle((left, top, left + width, top + height), fill="gray")
                image.save(folder / f"{number}.png")


def my_model(classes: int) -> nn.Module:
    """Return a torch module with one logit per class; the function may also take `input_shape`."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 7, stride=4), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(16, classes)),
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        draw_images(Path(folder))
        result = polyfed.run(folder, method="fedbn", model=my_model, rounds=10, batch_size=8, unseen=("fog",))
    print("seen  ", result.accuracy["seen"])
    print("unseen", result.accuracy["unseen"])
    day_model, newcomer = result.model_for("day"), result.newcomer()
    print(type(day_model).__name__, "for the client day,", type(newcomer).__name__, "for a newcomer")
