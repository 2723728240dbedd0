"""Classify images with a file that `polyfed export RUN --to onnx` wrote; polyfed and torch are not needed.

Run: python examples/classify_with_onnx.py model.onnx image.png ...
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession(sys.argv[1])
about = session.get_modelmeta().custom_metadata_map
keys = ("classes", "input_shape", "normalised", "resized")
classes, (channels, height, width), how, resized = (json.loads(about[key]) for key in keys)
for file in sys.argv[2:]:
    image = Image.open(file).convert("L" if channels == 1 else "RGB")
    if resized["middle_square"]:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.float32).reshape(height, width, channels) / how["scale"]
    x = ((pixels - how["mean"]) / how["std"]).transpose(2, 0, 1)[None].astype(np.float32)
    (logits,) = session.run(["logits"], {"images": x})
    print(f"{file}: {classes[logits[0].argmax()]}")
