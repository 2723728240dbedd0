"""polyfed: the argument is a method expression."""

from __future__ import annotations

import sys

from torch.utils.data import TensorDataset
from two_clients import BATCH, LEARNING_RATE, ROUNDS, SAMPLES, Net, images, note

import polyfed


def main(method: str) -> None:
    data = {f"client_{client}": (TensorDataset(*images(client)), TensorDataset(*images(client))) for client in SAMPLES}
    result = polyfed.run(data, method=method, model=Net(), rounds=ROUNDS, batch_size=BATCH, lr=LEARNING_RATE)
    note("server", result.newcomer())


if __name__ == "__main__":
    main(sys.argv[1])
