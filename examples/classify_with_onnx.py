"""Classify images with a file that `polyfed export RUN --to onnx` wrote; polyfed and torch are not needed.

Run: python examples/classify_with_onnx.py model.onnx image.png ...

Images with more than 8 bits are scaled by the range in the file. If it has several, choose one with --domain NAME.
"""

import argparse
import json

import numpy as np
import onnxruntime
from PIL import Image

options = argparse.ArgumentParser()
options.add_argument("model")
options.add_argument("images", nargs="+")
options.add_argument("--domain")
options = options.parse_args()
session = onnxruntime.InferenceSession(options.model)
about = session.get_modelmeta().custom_metadata_map
keys = ("classes", "input_shape", "normalised", "resized", "deep_ranges")
classes, (channels, height, width), how, resized, deep_ranges = (json.loads(about[key]) for key in keys)


def limits(file: str, mode: str) -> tuple[float, float]:
    """Return the values that become black and white."""
    kind = "floats" if mode == "F" else "integers"
    found = {domain: tuple(ranges[kind]) for domain, ranges in deep_ranges.items() if kind in ranges}
    if options.domain in found:
        return found[options.domain]
    if len(set(found.values())) != 1:
        raise SystemExit(f"{file} has more than 8 bits. Choose a range with --domain: {found or 'the model has none'}.")
    return next(iter(found.values()))


for file in options.images:
    opened = Image.open(file)
    deep = opened.mode == "F" or opened.mode.startswith("I")
    plain = "L" if channels == 1 else "RGB"
    image = Image.fromarray(np.asarray(opened).astype(np.float32)) if deep else opened.convert(plain)
    if resized["middle_square"]:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), np.float32)
    if deep:
        black, white = limits(file, opened.mode)
        pixels = np.rint(((pixels - black) / max(white - black, 1e-12)).clip(0, 1) * 255)
        pixels = np.repeat(pixels[..., None], channels, axis=2)
    pixels = pixels.reshape(height, width, channels) / how["scale"]
    x = ((pixels - how["mean"]) / how["std"]).transpose(2, 0, 1)[None].astype(np.float32)
    (logits,) = session.run(["logits"], {"images": x})
    print(f"{file}: {classes[logits[0].argmax()]}")
